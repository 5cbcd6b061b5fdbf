"""Which scheme each layer uses: boundary protection and per-layer mixes.

``boundary=n`` keeps the first and last n layers in BF16. A mix names layers after semicolons, counted from 0 or, with a
minus sign, from the end: ``flagrot-kivi:bits=2;0-1=fp8;-1=bf16``. Windows belong to the first spec and hold for all
layers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np

from jkv.core import PAGE_TOKENS, Scheme, Windows
from jkv.errors import JkvError

_RANGE = re.compile(r"^(-?\d+)(?:-(\d+))?$")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A scheme for every layer, and the spec that says so."""

    spec: str
    layers: tuple[Scheme, ...]

    @property
    def windows(self) -> Windows:
        """The windows that all layers share, with the boundary that was asked for."""
        return self.layers[len(self.layers) // 2].windows

    def token_bytes(self, head_dim: int) -> float:
        """Bytes of one token of one KV head, K and V, summed over layers."""
        return sum(scheme.token_bytes(head_dim) for scheme in self.layers)

    def bits(self, head_dim: int) -> float:
        """Mean stored bits per value over K, V and layers."""
        return self.token_bytes(head_dim) * 8 / (2 * head_dim * len(self.layers))


def components(scheme: Scheme) -> tuple[Scheme, ...]:
    """The distinct schemes of a mix, without its layer ranges: what a calibration decides for."""
    base = dataclasses.replace(scheme, spec=scheme.spec.split(";")[0], mix=())
    return tuple(dict.fromkeys((base, *(part for _, part in scheme.mix))))


def plan_layers(scheme: Scheme, num_layers: int) -> Plan:
    """Resolve boundary protection and layer ranges for a model of ``num_layers`` layers.

    Raises:
      JkvError: for a layer outside the model, or a boundary that leaves no layer to quantize.
    """
    from jkv.registry import parse

    base = components(scheme)[0]
    layers = [base] * num_layers
    for text, part in scheme.mix:
        for layer in _layers(text, num_layers, scheme.spec):
            layers[layer] = dataclasses.replace(part, windows=base.windows)
    n = base.windows.boundary
    if n and 2 * n >= num_layers and base.name != "bf16":
        raise JkvError(
            f"boundary={n} in {scheme.spec!r} keeps all {num_layers} layers of this model in BF16; boundary must be "
            f"below {-(-num_layers // 2)}"
        )
    exact = dataclasses.replace(parse("bf16"), windows=base.windows)
    for layer in range(min(n, num_layers)):
        layers[layer] = layers[num_layers - 1 - layer] = exact
    return Plan(scheme.spec, tuple(layers))


def check_range(text: str, spec: str) -> None:
    """Refuse a layer range that is not ``3``, ``-1`` or ``0-3``."""
    match = _RANGE.match(text)
    if not match or (match[2] and not 0 <= int(match[1]) <= int(match[2])):
        raise JkvError(
            f"layers {text!r} in {spec!r} are not allowed; write 3, -1 (the last) or 0-3, with commas between"
        )


def _layers(text: str, num_layers: int, spec: str) -> list[int]:
    found = []
    for part in text.split(","):
        match = _RANGE.match(part)
        assert match is not None, "ranges are checked when the spec is parsed"
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        for layer in range(first, last + 1):
            if not -num_layers <= layer < num_layers:
                raise JkvError(
                    f"layer {layer} in {spec!r} does not exist: the model has {num_layers} layers, 0 to "
                    f"{num_layers - 1}"
                )
            found.append(layer % num_layers)
    return found


def mix_for_budget(
    schemes: Sequence[Scheme], errors: Mapping[str, np.ndarray], head_dim: int, budget: float
) -> list[Scheme]:
    """The scheme of each layer that minimizes the summed error within a budget of bytes per token and KV head.

    ``errors[spec]: [L]`` is each layer's error under each scheme, in any one unit (KL with only that layer quantized,
    say). Exact: dynamic programming over whole units of bytes, layer by layer. Among equal errors the cheaper mix wins.

    Raises:
      JkvError: where even the cheapest scheme exceeds the budget, or an error is missing, not finite or misshapen.
    """
    table = np.stack([_layer_errors(scheme, errors) for scheme in schemes])  # [schemes, L]
    cost = np.array([scheme.page_bytes(head_dim) for scheme in schemes])
    num_layers = table.shape[1]
    least = num_layers * cost.min()
    if least > budget * PAGE_TOKENS * (1 + 1e-12):
        raise JkvError(
            f"budget={budget:g} bytes per token and KV head is below the cheapest scheme's {least / PAGE_TOKENS:g} "
            f"({schemes[int(np.argmin(cost))].spec} in all {num_layers} layers)"
        )
    # Above the cheapest mix every cost is a multiple of `unit`; more than the dearest mix cannot be spent.
    extra = cost - cost.min()
    unit = int(np.gcd.reduce(extra)) or 1
    extra = extra // unit
    room = int(min((budget * PAGE_TOKENS * (1 + 1e-12) - least) // unit, num_layers * extra.max()))
    best = np.zeros(room + 1)  # the least error of the layers so far within each number of units
    picks = []
    for layer in range(num_layers):
        options = np.full((len(schemes), room + 1), np.inf)
        for option, spent in enumerate(extra.tolist()):
            if spent <= room:
                options[option, spent:] = table[option, layer] + best[: room + 1 - spent]
        picks.append(np.argmin(options, axis=0))
        best = options.min(axis=0)
    left = int(np.flatnonzero(best == best[-1])[0])
    chosen: list[Scheme] = []
    for pick in reversed(picks):
        option = int(pick[left])
        chosen.append(schemes[option])
        left -= int(extra[option])
    return chosen[::-1]


def _layer_errors(scheme: Scheme, errors: Mapping[str, np.ndarray]) -> np.ndarray:
    if scheme.spec not in errors:
        raise JkvError(f"errors has no entry for {scheme.spec!r}; it has {', '.join(errors) or 'none'}")
    found = np.asarray(errors[scheme.spec], np.float64)
    if found.ndim != 1 or not np.isfinite(found).all():
        raise JkvError(f"errors of {scheme.spec!r} must be one finite number per layer")
    return found
