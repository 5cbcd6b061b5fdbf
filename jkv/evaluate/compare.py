"""``compare``: every scheme against exact attention on a real model, streaming-exact, in one table.

Sequences are the outer loop and schemes the inner one, so the reference's predictions exist for one sequence at a
time. Positions below 32 are left out of the means: there nothing is quantized yet in any paged cache.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jkv._version import __version__
from jkv.binding import bind_layers, check_calibration
from jkv.calibration import Calibration, check_scheme
from jkv.core import PAGE_TOKENS, Array, Scheme
from jkv.errors import JkvError
from jkv.evaluate.kl import Distance, distance, reference_of
from jkv.evaluate.stream import streamed_attention
from jkv.models.attention import exact_attention
from jkv.models.load import Model
from jkv.plan import Plan, plan_layers
from jkv.registry import check_head_dim, parse

Progress = Callable[[int, int, str], None]


def default_schemes() -> list[str]:
    """The specs of ``jkv compare`` without ``--scheme``: each family at the bits people would serve it with."""
    return [
        "bf16",
        "fp8",
        "rtn:bits=4",
        "turboquant:bits=4",
        "ultra-tq:scale=block,v=same",
        "ultraquant",
        "flagrot-auto:bits=4",
        "flagrot-kivi:bits=4",
        "kivi:bits=4",
        "rotatekv:bits=2",
        "kivi:bits=2",
        "flagrot-auto:bits=2",
        "flagrot-kivi:bits=2",
    ]


@dataclasses.dataclass(frozen=True)
class Row:
    """One scheme's cost and saving. Bytes are the page layout's, all layers; KL is in nats, times 1000."""

    scheme: str
    bits_per_value: float
    bytes_per_token: float
    compression: float
    kl_x1000: float
    kl_se: float
    top1_agreement: float
    perplexity: float
    perplexity_delta: float
    tail: str
    sink: int
    recent: int
    boundary: int
    compressed_tokens: int
    evaluation_only: bool = False
    kl_by_sequence: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What ``compare`` found, rows sorted by bytes per token."""

    model: str
    tokens: int
    sequences: int
    kinds: tuple[str, ...]
    reference_perplexity: float
    versions: dict[str, str]
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists; ``tokens`` is the number per sequence."""
        data = dataclasses.asdict(self)
        return data | {"kinds": list(self.kinds), "rows": [dataclasses.asdict(row) for row in self.rows]}


def versions() -> dict[str, str]:
    """What produced a figure: library versions, Python and the device."""
    device = jax.devices()[0]
    return {
        "jkv-cache": __version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": device.device_kind if device.platform != "cpu" else f"cpu ({platform.machine()})",
    }


def check(model: Model, schemes: Sequence[Scheme], tokens: np.ndarray, calibration: Calibration | None) -> None:
    """Refuse what cannot be compared, before any work.

    Raises:
      JkvError: for no schemes, sequences shorter than two pages or longer than the model's context, a head_dim that
        a scheme cannot store, windows that cover all tokens, or a calibration of another model or scheme.
    """
    config = model.config
    if not schemes:
        raise JkvError("no scheme to compare; give at least one --scheme SPEC")
    if tokens.ndim != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 2 * PAGE_TOKENS:
        raise JkvError(
            f"tokens of shape {list(tokens.shape)} leave nothing to compare; [sequences, tokens] must be at least "
            f"[1, {2 * PAGE_TOKENS}]: one sequence of two pages"
        )
    if tokens.shape[1] > config.max_position_embeddings:
        raise JkvError(
            f"tokens={tokens.shape[1]} exceeds the model's context of {config.max_position_embeddings} tokens"
        )
    check_calibration(model, calibration)
    for scheme in schemes:
        check_head_dim(scheme, config.head_dim)
        check_scheme(calibration, scheme)
        plan, windows = plan_layers(scheme, config.num_layers), scheme.windows
        read = compressed_tokens(plan, tokens.shape[1] - 1)  # what the last query finds quantized
        if read == 0 and any(layer.name != "bf16" for layer in plan.layers):
            raise JkvError(
                f"{plan.spec!r} would compress none of the {tokens.shape[1]} tokens before a query reads them "
                f"(sink={windows.sink}, recent={windows.recent}); use longer sequences or smaller windows"
            )


def compare(
    model: Model,
    schemes: Sequence[Scheme],
    tokens: np.ndarray,
    *,
    calibration: Calibration | None = None,
    kinds: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Measure ``schemes`` on ``tokens: int[N, T]`` against the model's exact predictions.

    The reference computes in the model's dtype (float32 on a CPU) with exact attention. ``kinds`` names each sequence's
    text. ``progress(done, total, what)`` is called as work is done.

    Raises:
      JkvError: see :func:`check`.
    """
    tokens = np.asarray(tokens)
    check(model, schemes, tokens, calibration)
    plans = [plan_layers(scheme, model.config.num_layers) for scheme in schemes]
    bound = [bind_layers(plan, model, calibration) for plan in plans]
    count, total = len(tokens), len(tokens) * (len(schemes) + 1)
    found: list[list[Distance]] = [[] for _ in schemes]
    reference_nll = []
    for index, row in enumerate(tokens):
        done = index * (len(schemes) + 1)
        where = f"sequence {index + 1}/{count}"
        if progress is not None:
            progress(done, total, f"{where}: reference")
        reference = reference_of(model.decoder, hidden_states(model, row), row)
        reference_nll.append(_text_nll(np.asarray(reference.log_likelihood)))
        for at, (plan, calib) in enumerate(zip(plans, bound, strict=True)):
            if progress is not None:
                progress(done + 1 + at, total, f"{where}: {plan.spec}")
            found[at].append(distance(model.decoder, hidden_states(model, row, plan, calib), reference, row))
    if progress is not None:
        progress(total, total, "done")
    base = float(np.exp(np.mean(reference_nll)))
    rows = [_row(model, plan, distances, base, tokens.shape) for plan, distances in zip(plans, found, strict=True)]
    return Comparison(
        model=model.name,
        tokens=tokens.shape[1],
        sequences=count,
        kinds=tuple(kinds or ()),
        reference_perplexity=base,
        versions=versions(),
        rows=tuple(sorted(rows, key=lambda r: (-r.bytes_per_token, r.kl_x1000))),
    )


def hidden_states(model: Model, row: np.ndarray, plan: Plan | None = None, calib: list[Any] | None = None) -> Array:
    """Final hidden states ``[T, E]`` of one sequence, with exact attention or through the plan's caches."""
    attention = exact_attention
    if plan is not None and calib is not None:

        def attention(layer: int, q: Array, k: Array, v: Array, state: Any) -> tuple[Array, Any]:
            return streamed_attention(plan.layers[layer], calib[layer], q, k, v), state

    return model.decoder.hidden(np.asarray(row)[None], attention=attention)[0][0]


def _text_nll(log_likelihood: np.ndarray) -> float:
    """Negative log-likelihood per token of the positions that count."""
    return float(-log_likelihood[PAGE_TOKENS:].astype(np.float64).mean())


def _row(model: Model, plan: Plan, found: list[Distance], base: float, shape: tuple[int, ...]) -> Row:
    config = model.config
    kl = np.array([d.kl[PAGE_TOKENS:].astype(np.float64).mean() for d in found]) * 1000
    se = float(kl.std(ddof=1) / len(kl) ** 0.5) if len(kl) > 1 else float("nan")
    perplexity = float(np.exp(np.mean([_text_nll(d.log_likelihood) for d in found])))
    stored = plan.token_bytes(config.head_dim) * config.num_kv_heads
    exact = 4 * config.head_dim * config.num_kv_heads * config.num_layers
    windows = plan.windows
    return Row(
        scheme=plan.spec,
        bits_per_value=stored * 8 / (exact / 2),
        bytes_per_token=stored,
        compression=exact / stored,
        kl_x1000=float(kl.mean()),
        kl_se=se,
        top1_agreement=float(np.mean([d.agree[PAGE_TOKENS:].mean() for d in found])),
        perplexity=perplexity,
        perplexity_delta=perplexity - base,
        tail=windows.tail,
        sink=windows.sink,
        recent=windows.recent,
        boundary=windows.boundary,
        compressed_tokens=compressed_tokens(plan, shape[1]) * shape[0],
        evaluation_only=any(scheme.simulate is not None for scheme in plan.layers),
        kl_by_sequence=tuple(float(x) for x in kl),
    )


def compressed_tokens(plan: Plan, length: int) -> int:
    """Tokens of a sequence that are held quantized once it has been written."""
    windows = plan.windows
    if windows.tail == "0":
        return max(length - windows.sink, 0)
    whole = max(length - windows.recent_pages * PAGE_TOKENS, 0) // PAGE_TOKENS * PAGE_TOKENS
    return max(whole - windows.sink, 0)


def parse_all(specs: Sequence[str]) -> list[Scheme]:
    """Parse specs; a scheme given twice is refused."""
    schemes = [parse(spec) for spec in specs]
    seen: set[str] = set()
    for scheme in schemes:
        if scheme.spec in seen:
            raise JkvError(f"scheme {scheme.spec!r} is given twice")
        seen.add(scheme.spec)
    return schemes
