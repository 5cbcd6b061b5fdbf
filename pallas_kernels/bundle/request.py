"""What a bundle shall hold: the settings that people serve, times targets."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from jkv.core import PAGE_TOKENS
from jkv.errors import JkvError
from jkv.options import AttentionOptions, check_center, check_range
from jkv.registry import parse
from pallas_kernels import build
from pallas_kernels.bundle.facts import Appending, Attention, Facts, Reading, Stepping, Writing, codec_spec
from pallas_kernels.bundle.ops import recipe_of

DEFAULT_SPECS = (
    "bf16",
    "fp8",
    "kivi:bits=2",
    "flagrot-kivi:bits=2,mode=group",
    "flagrot-auto:bits=2,mode=key",
    "flagrot-auto:bits=4,mode=key",
    "rtn:bits=4",
    "turboquant:bits=4",
    "ultra-tq",
    "ultraquant",
)
"""What a bundle holds unless told otherwise: the formats people serve."""


@dataclasses.dataclass(frozen=True)
class Request:
    """Every combination of these. ``steps`` are query tokens a sequence; more than one bring keys of their own.

    ``softcap``, ``scale`` and ``sink_logits`` are of all attention, ``windows`` of some: layers without a window have
    None.

    Raises:
      JkvError: naming what is not allowed.
    """

    targets: tuple[str, ...] = tuple(build.TARGETS)
    specs: tuple[str, ...] = DEFAULT_SPECS
    head_dims: tuple[int, ...] = (64, 128, 256)
    gqas: tuple[int, ...] = (1, 4, 8)
    num_kv_heads: tuple[int, ...] = (8,)
    steps: tuple[int, ...] = (1, 8, 64)
    block_tokens: int = 64
    dtype: str = "bfloat16"
    windows: tuple[int | None, ...] = (None,)
    softcap: float | None = None
    scale: float | None = None
    sink_logits: bool = False

    def __post_init__(self) -> None:
        for target in self.targets:
            build.platform_of(target)
        for name in ("head_dims", "gqas", "num_kv_heads", "steps"):
            for value in getattr(self, name):
                if value < 1:
                    raise JkvError(f"{name}={value} is not allowed; it must be at least 1")
        if self.block_tokens < PAGE_TOKENS or self.block_tokens % PAGE_TOKENS:
            raise JkvError(
                f"block_tokens={self.block_tokens} is not allowed; it must be a multiple of {PAGE_TOKENS}, one page"
            )
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise JkvError(f"dtype={self.dtype!r} is not allowed; it must be bfloat16, float16 or float32")
        for spec in self.specs:
            scheme = parse(spec)
            for options in self.options():
                check_range(options)
                check_center(options, scheme)
            if scheme.mix or scheme.simulate is not None:
                why = (
                    "mixes schemes by layer; name each of them" if scheme.mix else "is for evaluation and has no pages"
                )
                raise JkvError(f"scheme {spec!r} {why}")

    def options(self) -> list[AttentionOptions]:
        """Of attention, those that kernels are for; sink logits stand for any."""
        logits = True if self.sink_logits else None
        return [AttentionOptions(self.softcap, window, logits, self.scale) for window in self.windows]


@dataclasses.dataclass(frozen=True)
class Job:
    """One kernel to lower, for targets that have the same texts."""

    op: str
    facts: Facts
    targets: tuple[str, ...]


def jobs_of(request: Request) -> list[Job]:
    """Everything to lower, each text once."""
    found: dict[tuple[object, ...], list[str]] = {}
    for op, facts in _settings(request):
        for target in request.targets:
            targets = found.setdefault((op, facts, recipe_of(op, facts, target)), [])
            if target not in targets:
                targets.append(target)
    return [Job(op, facts, tuple(targets)) for (op, facts, _), targets in found.items()]  # type: ignore[arg-type]


def jobs_for(facts: Facts, target: str) -> list[Job]:
    """All operations of one setting on one target."""
    if isinstance(facts, Attention):
        ops: tuple[str, ...] = ("prepare", "split", "combine")
    elif isinstance(facts, Reading):
        ops = ("read",)
    elif isinstance(facts, Appending):
        ops = ("append",)
    elif isinstance(facts, Stepping):
        ops = ("step",)
    else:
        ops = _writes(parse(facts.spec).granularity, facts.tail)
    return [Job(op, facts, (target,)) for op in ops]


def _settings(request: Request) -> Iterator[tuple[str, Facts]]:
    for spec in request.specs:
        scheme = parse(spec)
        windows, codecs = scheme.windows, codec_spec(scheme.spec)
        yield "step", Stepping(windows.tail_tokens, request.block_tokens)
        for head_dim in request.head_dims:
            for heads in request.num_kv_heads:
                common: dict[str, Any] = {"block_tokens": request.block_tokens, "tail": windows.tail_tokens}
                common["dtype"] = request.dtype
                writing = Writing(codecs, head_dim, heads, **common)
                yield from ((op, writing) for op in _writes(scheme.granularity, windows.tail_tokens))
                yield "read", Reading(codecs, head_dim, heads, request.block_tokens, request.dtype)
                if windows.tail_tokens or windows.sink:
                    kept = (windows.tail_tokens, windows.sink)
                    yield "append", Appending(head_dim, heads, *kept, request.dtype)
                # What an engine needs that has its own rows.
                placed = bool(windows.tail_tokens) and not windows.sink
                if placed:
                    yield "flush", dataclasses.replace(writing, placed=True)
                    yield "append", Appending(head_dim, heads, *kept, request.dtype, placed=True)
                for gqa, steps, options in itertools.product(request.gqas, request.steps, request.options()):
                    asked = {name: getattr(options, name) for name in ("softcap", "window", "scale")}
                    asked["sink_logits"] = options.sink_logits is not None
                    facts = Attention(
                        codecs,
                        head_dim,
                        heads,
                        gqa,
                        sinks=windows.sink,
                        steps=steps,
                        fresh=steps > 1,
                        **asked,
                        **common,
                    )
                    yield from ((op, facts) for op in ("prepare", "split", "combine"))
                    if placed and steps == 1:
                        yield "combine", dataclasses.replace(facts, placed=True)


def _writes(granularity: str, tail: int) -> tuple[str, ...]:
    if not tail:
        return ("write",)
    return ("write_pages", "flush") if granularity == "group" else ("write", "write_pages", "flush")
