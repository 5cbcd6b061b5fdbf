"""What a kernel is made for: everything that its text depends on. Sizes it does not depend on."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any

from jkv.units import PAGE_TOKENS

_WINDOWS = ("tail", "sink", "recent", "boundary")


@dataclasses.dataclass(frozen=True)
class Attention:
    """``spec`` has no windows (:func:`codec_spec`). ``tail`` is slots of the BF16 ring, ``sinks`` first BF16 tokens.

    ``steps`` query tokens a sequence; ``fresh`` says that they come with keys and values of their own. ``dtype`` is
    that of queries, fresh keys and outputs. ``placed`` says that rows name the ring that is theirs. The other fields
    are of :class:`pallas_kernels.options.AttentionOptions`.
    """

    spec: str
    head_dim: int
    num_kv_heads: int
    gqa: int
    block_tokens: int = 64
    tail: int = PAGE_TOKENS
    sinks: int = 0
    steps: int = 1
    fresh: bool = False
    dtype: str = "bfloat16"
    softcap: float | None = None
    window: int | None = None
    scale: float | None = None
    sink_logits: bool = False
    placed: bool = False


@dataclasses.dataclass(frozen=True)
class Writing:
    """``tail`` is the slots of the ring that ``flush`` reads, ``dtype`` that of keys and values, ``queries`` how many
    calibration queries a head has, where a scheme measures candidates by them; ``placed`` as for attention."""

    spec: str
    head_dim: int
    num_kv_heads: int
    block_tokens: int = 64
    tail: int = PAGE_TOKENS
    dtype: str = "bfloat16"
    queries: int = 512
    placed: bool = False


@dataclasses.dataclass(frozen=True)
class Reading:
    """Pages back as rows of ``dtype``."""

    spec: str
    head_dim: int
    num_kv_heads: int
    block_tokens: int = 64
    dtype: str = "bfloat16"


@dataclasses.dataclass(frozen=True)
class Appending:
    """A token a row on its way to pages, whatever their scheme: ``tail`` slots of the ring, ``sinks`` first tokens;
    ``dtype`` is that of keys and values; ``placed`` as for attention."""

    head_dim: int
    num_kv_heads: int
    tail: int = PAGE_TOKENS
    sinks: int = 0
    dtype: str = "bfloat16"
    placed: bool = False


@dataclasses.dataclass(frozen=True)
class Stepping:
    """Where a decoding step writes, whatever the scheme: ``tail`` slots of the ring, 0 where there is none."""

    tail: int = PAGE_TOKENS
    block_tokens: int = 64


Facts = Attention | Writing | Reading | Appending | Stepping
OPS: dict[str, type[Attention] | type[Writing] | type[Reading] | type[Appending] | type[Stepping]] = {
    "prepare": Attention,
    "split": Attention,
    "combine": Attention,
    "write": Writing,
    "write_pages": Writing,
    "flush": Writing,
    "read": Reading,
    "append": Appending,
    "step": Stepping,
}


def codec_spec(spec: str) -> str:
    """A spec without the windows that it states: what the bytes of a page depend on."""

    def side(text: str) -> str:
        name, _, options = text.partition(":")
        kept = [option for option in options.split(",") if option and option.split("=")[0] not in _WINDOWS]
        return name + (":" + ",".join(kept) if kept else "")

    return "/".join(side(text) for text in spec.split("/"))


def layout_digest(page: Any) -> str:
    """What tells two page layouts apart: of :class:`jkv.page.PageLayout`, or of a description's page."""
    fields: Iterable[Any] = page.fields
    lines = [f"{f.name} {getattr(f.dtype, 'name', f.dtype)} {tuple(f.shape)} {f.offset}" for f in fields]
    return hashlib.sha256("\n".join([*lines, str(page.nbytes)]).encode()).hexdigest()[:16]
