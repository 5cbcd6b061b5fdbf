"""One attention layer of a serving engine: pages in the engine's pool, unfinished pages in BF16 beside it.

``write`` comes before ``attend`` and quantizes all that a step fills: tokens where a scheme takes each at once, else
whole pages. Other rows of the same step may read them, since engines share a block as soon as its tokens are known. A
row itself reads pages that were full before the step, and the rest and the step's tokens as BF16 holds them, as
:class:`torch_bridge.cache.PagedCache` does; so chunks put what is left of them into BF16 after ``attend`` has read what
it takes the place of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jkv.errors import JkvError
from jkv.options import AttentionOptions
from jkv.units import PAGE_TOKENS
from torch_bridge import ops
from torch_bridge.backends import find
from torch_bridge.backends.protocol import Rows
from torch_bridge.reference import ring
from torch_bridge.store import Scheme
from torch_bridge.vllm.batch import Chunk, Pages, Prompt, Singles, Step
from torch_bridge.vllm.prompt import Context, attend_prompt

Pair = tuple[Tensor, Tensor]


class ServedLayer:
    """A layer's scheme, its BF16 memory ``waiting: bfloat16[2, places, H, 32, D]`` (None: every token is quantized at
    once) and counts: ``nonfinite``, values that were stored as zero, and calls."""

    def __init__(
        self,
        scheme: Scheme,
        waiting: Tensor | None,
        options: AttentionOptions | None = None,
        implementation: str | None = None,
        device: torch.device | str = "cpu",
    ):
        self.scheme, self.waiting = scheme, waiting
        self.options, self.implementation = options or AttentionOptions(), implementation
        self._nonfinite = torch.zeros(1, dtype=torch.int32, device=device)
        prepare = getattr(find(self._nonfinite.device, implementation), "rows", None)
        self._rows: Rows | None = None if prepare is None else prepare(scheme, self.options, waiting)
        self.writes = self.reads = 0
        # From write to attend: the step's tokens as BF16, and the BF16 pages of rows of one token.
        self._settled: Tensor | None = None
        self._gathered: Pair | None = None

    @property
    def nonfinite(self) -> Tensor:
        """How many values were not finite, ``[1]``."""
        return self._nonfinite if self._rows is None else self._nonfinite + self._rows.nonfinite()

    def write(self, k: Tensor, v: Tensor, pool: Tensor, step: Step) -> None:
        """Write a step's tokens ``k, v: [tokens or more, H, D]``.

        Raises:
          JkvError: for values that are not finite, on a CPU.
        """
        self.writes += 1
        k, v = k[: step.tokens], v[: step.tokens]
        if self._rows is not None and step.is_decoding:
            assert step.singles is not None
            if self._rows.write(k, v, pool, step.singles):
                return
        if self.waiting is None:
            bad = ops.write_kv(
                self.scheme.text, self.scheme.arrays, k, v, pool, step.slot_mapping, implementation=self.implementation
            )
            self._nonfinite += bad.sum(dtype=torch.int32)
            if pool.device.type == "cpu" and bool(bad.any()):
                raise JkvError("k or v holds a value that is not finite")
            return
        settled = self._settle(k, v, step)
        if step.pages is not None:
            self._write_pages(settled, pool, step.pages)
        if step.singles is not None:
            own = settled[:, :, : len(step.singles.total)]
            self._wait(own, step.singles.place, step.singles.offset)
            self._gathered = self._tail(step.singles.place)
            self._seal(pool, step.singles, self._gathered)
        if step.rest is not None:
            self._settled = settled

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pool: Tensor, step: Step, out: Tensor) -> None:
        """Attention of the step's tokens ``q: [tokens or more, Hq, D]``, into ``out`` of the same form."""
        self.reads += 1
        if step.singles is not None:
            count = len(step.singles.total)
            if self._rows is None or not self._rows.attend(q[:count], pool, step.singles, out[:count]):
                out[:count] = self._attend_singles(q[:count], pool, step.singles, self._gathered)
            self._gathered = None
        for chunk in step.chunks:
            made = self._attend_chunk(q, k, v, pool, chunk).flatten(0, 1)
            out[chunk.into] = made[chunk.back].to(out.dtype)
        for prompt in step.prompts:
            own = slice(prompt.first, prompt.first + prompt.steps)
            out[own] = self._attend_prompt(q[own], k[own], v[own], pool, prompt)
        if step.rest is not None:
            assert self._settled is not None
            self._wait(self._settled[:, :, step.rest.token], step.rest.place, step.rest.offset)
            self._settled = None

    def _attend_singles(self, q: Tensor, pool: Tensor, rows: Singles, tail: Pair | None) -> Tensor:
        if self.waiting is not None and tail is None:  # written by launches
            tail = self._tail(rows.place)
        made = ops.decode_attention(
            self.scheme.text, self.scheme.arrays, q[:, None], pool, rows.block_table, rows.total, sealed=rows.sealed,
            tail=tail, options=self.options, implementation=self.implementation,
        )  # fmt: skip
        return made[:, 0]

    def _attend_chunk(self, q: Tensor, k: Tensor, v: Tensor, pool: Tensor, rows: Chunk) -> Tensor:
        tail = None if self.waiting is None else self._tail(rows.place)
        return ops.extend_attention(
            self.scheme.text, self.scheme.arrays, q[rows.token], (k[rows.token], v[rows.token]), pool,
            rows.block_table, rows.before, counts=rows.counts, sealed=rows.sealed, tail=tail, options=self.options,
            implementation=self.implementation,
        )  # fmt: skip

    def _attend_prompt(self, q: Tensor, k: Tensor, v: Tensor, pool: Tensor, row: Prompt) -> Tensor:
        tail = self._tail(row.place) if self.waiting is not None and row.before % PAGE_TOKENS else None
        context = Context(self.scheme, pool, tail, self.implementation)
        return attend_prompt(context, row, q, k, v, self.options)

    def _tail(self, place: Tensor) -> Pair:
        """The BF16 pages of rows, ``[B, H, 32, D]`` each."""
        assert self.waiting is not None
        tail = self.waiting[:, place]
        return tail[0], tail[1]

    def _settle(self, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Tokens as BF16 without the mean key, ``[2, H, tokens, D]``."""
        settled, bad = ring.settle(k[None], v[None], self.scheme.mean, step.live[None])
        self._nonfinite += bad
        return settled[:, 0]

    def _wait(self, settled: Tensor, place: Tensor, offset: Tensor) -> None:
        """Put tokens ``[2, H, N, D]`` into BF16."""
        assert self.waiting is not None
        self.waiting[:, place, :, offset] = settled.permute(2, 0, 1, 3)

    def _write_pages(self, settled: Tensor, pool: Tensor, pages: Pages) -> None:
        """Quantize the pages that chunks fill, of which the first tokens may have waited."""
        assert self.waiting is not None
        new = settled[:, :, pages.token].permute(0, 2, 3, 1, 4)  # [2, N, 32, H, D]
        old = self.waiting[:, pages.place].transpose(2, 3)
        first = torch.arange(old.shape[2], device=old.device) < pages.waiting[:, None]
        k, v = torch.where(first[None, :, :, None, None], old, new)
        ops.write_pages(
            self.scheme.text, self.scheme.centred, k, v, pool, pages.entry, implementation=self.implementation
        )

    def _seal(self, pool: Tensor, rows: Singles, tail: Pair) -> None:
        """Quantize the pages that rows of one token have filled."""
        if pool.device.type == "cpu" and not bool((rows.page >= 0).any()):
            return
        start = torch.zeros_like(rows.page)
        ops.flush_group(
            self.scheme.text, self.scheme.arrays, *tail, pool, start, rows.page, implementation=self.implementation
        )
