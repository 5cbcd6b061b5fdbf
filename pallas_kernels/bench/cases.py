"""Shapes to measure, and what a decoding step of each has to move and to compute."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from jkv.core import PAGE_TOKENS
from jkv.errors import JkvError
from jkv.page import layout
from jkv.registry import check_head_dim, parse

HEAD_DIMS = (64, 128, 256)
MOST_GROUP = 16  # query heads of one KV head
CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)
BATCHES = (1, 8, 32, 64)
HEADS = ((8, 8), (32, 8), (64, 8))  # GQA 1, 4 and 8
CENTRE = (32, 32768, (32, 8), 128)  # batch, context, heads, head_dim that the sweeps cross in


@dataclasses.dataclass(frozen=True)
class BenchCase:
    """One decoding step: ``batch`` sequences of ``context`` stored tokens each, one query token a sequence.

    Raises:
      JkvError: for sizes that the kernels do not take, or a scheme that has no page.
    """

    scheme: str
    batch: int
    context: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("batch", "context", "num_q_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise JkvError(f"{name}={getattr(self, name)} is not allowed; {name} must be at least 1")
        if self.num_q_heads % self.num_kv_heads or self.group > MOST_GROUP:
            raise JkvError(
                f"heads={self.num_q_heads}/{self.num_kv_heads} is not allowed; query heads must be 1 to {MOST_GROUP} "
                "times the KV heads"
            )
        if self.head_dim not in HEAD_DIMS:
            raise JkvError(f"head_dim={self.head_dim} is not allowed; kernels exist for 64, 128 and 256")
        if self.block_tokens < PAGE_TOKENS or self.block_tokens % PAGE_TOKENS:
            raise JkvError(f"block_tokens={self.block_tokens} is not allowed; it must be a multiple of {PAGE_TOKENS}")
        scheme = parse(self.scheme)
        if scheme.mix:
            raise JkvError(f"{self.scheme!r} mixes schemes by layer, each with its own kernel; give one of them")
        check_head_dim(scheme, self.head_dim)
        layout(scheme, self.head_dim)

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def blocks(self) -> int:
        """Blocks of one sequence."""
        return -(-self.context // self.block_tokens)

    @property
    def pool_bytes(self) -> int:
        """Bytes of all blocks of the batch."""
        page = layout(parse(self.scheme), self.head_dim).nbytes
        return self.batch * self.blocks * (self.block_tokens // PAGE_TOKENS) * page * self.num_kv_heads

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """What two cases must share to be compared: everything but the scheme."""
        return self.batch, self.context, self.num_q_heads, self.num_kv_heads, self.head_dim


def decode_bytes(case: BenchCase) -> int:
    """Bytes that a decoding step must move: stored K and V once, block table, BF16 queries and outputs.

    Partial results of splits are not counted: they are a cost of the method, not of the work.
    """
    page = layout(parse(case.scheme), case.head_dim)
    stored = round(case.batch * case.num_kv_heads * case.context * page.token_bytes)
    rows = case.batch * case.num_q_heads * case.head_dim * 2
    return stored + case.batch * case.blocks * 4 + 2 * rows


def decode_flops(case: BenchCase) -> int:
    """Floating-point operations of scores and output: ``4 B Hq N D`` (a multiply and an add each)."""
    return 4 * case.batch * case.num_q_heads * case.context * case.head_dim


def write_bytes(scheme: str, tokens: int, num_kv_heads: int, head_dim: int) -> int:
    """Bytes that writing ``tokens`` must move: BF16 keys and values in, stored form out, an int32 slot a token."""
    stored = layout(parse(scheme), head_dim).token_bytes
    return round(tokens * (num_kv_heads * (2 * head_dim * 2 + stored) + 4))


def product(
    scheme: str,
    contexts: Sequence[int],
    batches: Sequence[int],
    heads: Sequence[tuple[int, int]],
    head_dim: int,
    block_tokens: int = 64,
) -> list[BenchCase]:
    """Every combination."""
    combinations = itertools.product(heads, batches, contexts)
    return [BenchCase(scheme, batch, context, *pair, head_dim, block_tokens) for pair, batch, context in combinations]


def star(scheme: str, head_dim: int = CENTRE[3], block_tokens: int = 64) -> list[BenchCase]:
    """The centre, then one thing varied at a time: context, batch, GQA ratio; last, one long sequence alone."""
    batch, context, heads, _ = CENTRE
    shapes = [
        (batch, context, heads),
        *((batch, other, heads) for other in CONTEXTS),
        *((other, context, heads) for other in BATCHES),
        *((batch, context, other) for other in HEADS),
        (1, CONTEXTS[-1], heads),
    ]
    return [BenchCase(scheme, b, c, *pair, head_dim, block_tokens) for b, c, pair in dict.fromkeys(shapes)]
