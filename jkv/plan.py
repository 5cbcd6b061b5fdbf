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

from jkv.core import Scheme, Windows
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
    if not _RANGE.match(text):
        raise JkvError(f"layers {text!r} in {spec!r} are not allowed; write 3, -1 (the last) or 0-3, with commas between")


def _layers(text: str, num_layers: int, spec: str) -> list[int]:
    found = []
    for part in text.split(","):
        match = _RANGE.match(part)
        assert match is not None, "ranges are checked when the spec is parsed"
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        for layer in range(first, last + 1):
            if not -num_layers <= layer < num_layers:
                raise JkvError(f"layer {layer} in {spec!r} does not exist: the model has {num_layers} layers, 0 to "
                               f"{num_layers - 1}")
            found.append(layer % num_layers)
    return found


def mix_for_budget(
    schemes: Sequence[Scheme], errors: Mapping[str, np.ndarray], head_dim: int, budget: float
) -> list[Scheme]:
    """The scheme of each layer that minimizes the summed error within a budget of bytes per token and KV head.

    ``errors[spec]: [L]`` is each layer's error under each scheme, in any one unit (KL with only that layer quantized,
    say). Starts from the cheapest scheme everywhere and repeatedly takes the upgrade that removes the most error per
    byte, along each layer's lower convex hull, so every prefix of the upgrades is optimal for the bytes it uses.

    Raises:
      JkvError: where even the cheapest scheme exceeds the budget.
    """
    cost = np.array([scheme.token_bytes(head_dim) for scheme in schemes])
    table = np.stack([np.asarray(errors[scheme.spec], np.float64) for scheme in schemes])  # [schemes, L]
    at = np.full(table.shape[1], int(np.argmin(cost)))
    spent = cost[at].sum()
    if spent > budget:
        raise JkvError(
            f"budget={budget:g} bytes per token and KV head is below the cheapest scheme's {spent:g} "
            f"({schemes[at[0]].spec} in all {len(at)} layers)"
        )
    while True:
        best: tuple[float, int, int] | None = None
        for layer, now in enumerate(at):
            extra, gain = cost - cost[now], table[now, layer] - table[:, layer]
            for option in np.flatnonzero((extra > 0) & (gain > 0) & (spent + extra <= budget)):
                rate = gain[option] / extra[option]
                if best is None or rate > best[0]:
                    best = (rate, layer, int(option))
        if best is None:
            return [schemes[i] for i in at]
        spent += cost[best[2]] - cost[at[best[1]]]
        at[best[1]] = best[2]
