"""A paged KV cache for one model in torch: :mod:`jkv.cache` with :mod:`jkv.write`, updated in place.

One decoding step: ``append`` in every layer, each followed by ``attend`` (or both at once, ``decode``), then ``seal``
once. A prompt, or any chunk: ``attend`` with the chunk and ``prefill`` in every layer, then ``advance`` once. The page
that a step fills is read in BF16 by that step and quantized at its end, so at rest at most 31 tokens (plus the recent
window) are unquantized.

Shapes depend on nothing that tokens change and nothing is read back from a GPU, so a CUDA graph can hold a step, and
``torch.compile(fullgraph=True)`` traces it. What changes rows stands between steps: :mod:`torch_bridge.rows`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jkv.errors import JkvError
from jkv.options import AttentionOptions
from jkv.units import PAGE_TOKENS
from torch_bridge import backends, ops
from torch_bridge.backends.protocol import Steps
from torch_bridge.binding import Bound
from torch_bridge.cache_checks import check_chunk, check_new, check_room, check_sizes, on_host, row_numbers
from torch_bridge.description import Description
from torch_bridge.reference import ring
from torch_bridge.store import Layer, Step, place, schemes_of, sealed_tokens, windows_of

Pair = tuple[Tensor, Tensor]


class PagedCache:
    """All layers of a batch of B sequences.

    ``layers`` are their tensors (:class:`torch_bridge.store.Layer`); ``block_table: int32[B, M]`` maps a row's i-th
    block of ``block_tokens`` tokens to a block of the pools; ``length: int32[B]``; ``nonfinite: int32[B]`` counts keys
    and values that were not finite (they are stored as zero; on a CPU they are refused).
    """

    def __init__(
        self,
        layers: Sequence[Description],
        calib: Sequence[Bound],
        *,
        batch: int,
        max_tokens: int,
        num_kv_heads: int,
        device: torch.device | str = "cpu",
        block_tokens: int = 64,
        implementation: str | None = None,
    ):
        """An empty cache for ``batch`` rows of up to ``max_tokens`` tokens, rounded up to whole blocks.

        Args:
          layers: one description a layer, as :func:`torch_bridge.describe.describe_layers` gives them.
          calib: what :func:`torch_bridge.binding.bind_layers` gives for them, on ``device``.
          implementation: who computes, :data:`torch_bridge.backends.NAMES`; None is the device's default.

        Raises:
          JkvError: for sizes below 1, block_tokens that is no multiple of 32, or calib of another scheme.
        """
        check_sizes(batch, max_tokens, num_kv_heads, block_tokens)
        self.schemes = schemes_of(layers, calib)
        self.windows = windows_of(layers)
        self.num_kv_heads, self.head_dim, self.block_tokens = num_kv_heads, layers[0].head_dim, block_tokens
        self.implementation = implementation
        device = torch.device(device)
        per_row = -(-max_tokens // block_tokens)
        self.block_table = torch.arange(batch * per_row, dtype=torch.int32, device=device).view(batch, per_row)
        self.length = torch.zeros(batch, dtype=torch.int32, device=device)
        self.nonfinite = torch.zeros(batch, dtype=torch.int32, device=device)
        rows = (batch, num_kv_heads, self.head_dim)
        pages = block_tokens // PAGE_TOKENS
        self.layers = [
            Layer.empty(layer.page.nbytes * pages, batch * per_row, rows, self.windows, device) for layer in layers
        ]

        self._prepared: tuple[Steps | None] | None = None

    def _steps(self) -> Steps | None:
        """Steps that the implementation has prepared for this cache, where it does that and nothing is traced."""
        if torch.compiler.is_compiling():
            return None
        if self._prepared is None:
            prepare = getattr(backends.find(self.device, self.implementation), "steps", None)
            self._prepared = (None if prepare is None else prepare(self),)
        return self._prepared[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """A cache of its own with the same tokens; schemes and their arrays are shared."""
        twin = copy.copy(self)
        twin.block_table, twin.length, twin.nonfinite = (
            x.clone() for x in (self.block_table, self.length, self.nonfinite)
        )
        twin.layers = [layer.clone() for layer in self.layers]
        twin._prepared = None
        return twin

    @property
    def batch(self) -> int:
        return self.block_table.shape[0]

    @property
    def device(self) -> torch.device:
        return self.block_table.device

    @property
    def pages_per_block(self) -> int:
        return self.block_tokens // PAGE_TOKENS

    @property
    def max_tokens(self) -> int:
        """Tokens that each row has blocks for."""
        return self.block_table.shape[1] * self.block_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor of the cache: :func:`torch_bridge.store.cache_bytes`."""
        own = (self.block_table, self.length, self.nonfinite)
        return sum(x.nbytes for x in own) + sum(x.nbytes for layer in self.layers for x in layer.tensors)

    def step(self, active: Tensor | None = None) -> Step:
        """What the layers of one decoding step share, worked out once: where rows, or ``active[B]`` ones, write.

        It holds until the next call.
        """
        counts = None if active is None else row_numbers(self, "active", active)
        steps = self._steps()
        found = None if steps is None else steps.numbers(self, counts)
        return self._step(counts) if found is None else found

    def _step(self, counts: Tensor | None) -> Step:
        total = self.length + (1 if counts is None else counts)
        if not self.windows.tail_tokens:
            valid = (total > self.length)[:, None]
            return Step(counts, total, total, place(self.block_table, self.length[:, None], valid, self.block_tokens))
        sealed = sealed_tokens(self.windows, self.length)
        full = (sealed_tokens(self.windows, total) > sealed)[:, None]
        page = place(self.block_table, sealed[:, None] // PAGE_TOKENS, full, self.pages_per_block)
        return Step(counts, total, sealed, page=page.flatten(), start=sealed % self.windows.tail_tokens)

    def decode(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Step, options: AttentionOptions | None = None
    ) -> Tensor:
        """:meth:`append` and :meth:`attend` of a decoding step in one: ``q[B, 1, Hq, D]`` sees the new token, too.

        Raises:
          JkvError: as those two.
        """
        steps = self._steps()
        out = None if steps is None else steps.decode(self, layer, q, k, v, step, options)
        if out is None:
            self.append(layer, k, v, step)
            out = self.attend(layer, q, pending=step, options=options)
        return out

    def append(self, layer: int, k: Tensor, v: Tensor, step: Tensor | Step | None = None) -> None:
        """Write one token ``k, v: [B, 1, H, D]`` at position ``length`` of each row.

        ``step`` is ``active[B]``, where only some rows take part, or what :meth:`step` made for all layers. ``length``
        does not move until :meth:`seal`; :meth:`attend` with ``pending=1`` sees the token before.

        Raises:
          JkvError: for tensors that do not fit, or (on a CPU) values that are not finite or a row without room.
        """
        steps = self._steps()
        if steps is not None and isinstance(step, Step) and steps.append(self, layer, k, v, step):
            return
        check_new(self, k, v)
        if k.shape[1] != 1:
            raise JkvError(f"append takes one token per row, not {k.shape[1]}; use prefill for more")
        step = self._shared(step)
        check_room(self, step.total)
        scheme, store = self.schemes[layer], self.layers[layer]
        if step.entry is None or self.windows.sink:
            ops.append_tail(
                k, v, store.tail, store.sinks, self.nonfinite, self.length, scheme.mean, step.counts,
                implementation=self.implementation,
            )  # fmt: skip
        if step.entry is not None:
            valid = None if step.counts is None else step.counts[:, None] > 0
            bad = self._write_tokens(layer, k, v, step.entry, valid)
            if not self.windows.sink:
                self.nonfinite += bad.sum(0, dtype=torch.int32)

    def prefill(
        self, layer: int, k: Tensor, v: Tensor, counts: Tensor | None = None, start: Tensor | None = None
    ) -> None:
        """Write a chunk ``k, v: [B, T, H, D]`` after each row's tokens: ``counts[B]`` of it, from ``start[B]`` on.

        By default all of it. Padding, on either side, never enters a group. Whole pages are quantized at once, the
        rest waits in the tail. Call :meth:`advance` once all layers are written.

        Raises:
          JkvError: as :meth:`append`, and (on a CPU) for counts that the chunk does not hold.
        """
        check_new(self, k, v)
        steps = k.shape[1]
        many = row_numbers(self, "counts", steps if counts is None else counts)
        first = row_numbers(self, "start", 0 if start is None else start)
        check_chunk(many, first, steps)
        check_room(self, self.length + many)
        offset = torch.arange(steps, device=self.device)
        valid = (offset >= first[:, None]) & (offset < (first + many)[:, None])
        width, store = self.windows.tail_tokens, self.layers[layer]
        if not width:
            entry = place(self.block_table, (self.length - first)[:, None] + offset, valid, self.block_tokens)
            bad = self._write_tokens(layer, k, v, entry, valid)
            self.nonfinite += bad.sum(0, dtype=torch.int32).view(entry.shape).sum(1, dtype=torch.int32)
            if not self.windows.sink:
                return
        settled, bad = ring.settle(k, v, self.schemes[layer].mean, valid)
        if start is not None:
            settled = ring.take(settled, (first[:, None] + offset).clamp(max=steps - 1))
        if self.windows.sink:
            ring.put_first(store.sinks, settled, self.length, many)
        if not width:
            return
        self.nonfinite += bad
        self._stage(layer, settled, many)

    def attend(
        self,
        layer: int,
        q: Tensor,
        fresh: Pair | None = None,
        counts: Tensor | None = None,
        pending: int | Tensor | Step = 0,
        start: Tensor | None = None,
        options: AttentionOptions | None = None,
    ) -> Tensor:
        """Attention of ``q[B, T, Hq, D]`` over cached tokens and a fresh chunk: :func:`jkv.attend.attend`.

        Cached are the first ``length + pending`` tokens: after :meth:`append`, ``pending=1`` or its step. ``fresh``
        is the chunk ``(k, v)``, ``[B, T, H, D]``, that the queries belong to, before it is written: causal,
        unquantized, with ``counts[B]`` valid tokens after ``start[B]`` tokens of padding.

        Raises:
          JkvError: for a query that does not fit, or options that the scheme does not allow.
        """
        scheme, store, paged = self.schemes[layer], self.layers[layer], self.windows.tail_tokens > 0
        if isinstance(pending, Step):
            steps = self._steps() if fresh is None else None
            out = None if steps is None else steps.attend(self, layer, q, pending, options)
            if out is not None:
                return out
            total, sealed = pending.total, pending.sealed
        else:
            total = self.length + pending
            sealed = sealed_tokens(self.windows, self.length) if paged else total
        tail = (store.tail[0], store.tail[1]) if paged else None
        sinks = (store.sinks[0], store.sinks[1]) if self.windows.sink else None
        where, who = (store.pool, self.block_table, total), self.implementation
        if fresh is None:
            return ops.decode_attention(
                scheme.text, scheme.arrays, q, *where, sealed=sealed, tail=tail, sinks=sinks, options=options,
                implementation=who,
            )  # fmt: skip
        return ops.extend_attention(
            scheme.text, scheme.arrays, q, fresh, *where, counts=counts, start=start, sealed=sealed, tail=tail,
            sinks=sinks, options=options, implementation=who,
        )  # fmt: skip

    def seal(self, step: Tensor | Step | None = None) -> None:
        """End a decoding step: ``length += 1``, or ``active[B]``, and quantize the pages that thereby left the tail."""
        step, steps = self._shared(step), self._steps()
        page, start = step.page, step.start
        if page is not None and start is not None:
            none = on_host(self.device) and not bool((page >= 0).any())
            if not none and (steps is None or not steps.flush(self, step)):
                for layer, store in enumerate(self.layers):
                    self._flush(layer, store.tail, start, page)
        if steps is not None:
            steps.count(self)
        self.length.copy_(step.total)

    def _shared(self, step: Tensor | Step | None) -> Step:
        """The step, or one for the rows that take part: whoever has one from :meth:`step` can go on using it."""
        if isinstance(step, Step):
            return step
        return self._step(None if step is None else row_numbers(self, "active", step))

    def advance(self, counts: Tensor | int) -> None:
        """Count the tokens that :meth:`prefill` has written in every layer: ``length += counts[B]``."""
        self.length += row_numbers(self, "counts", counts)

    def _stage(self, layer: int, settled: Tensor, counts: Tensor) -> None:
        """Put ``counts[B]`` settled tokens ``[2, B, H, T, D]`` behind those of the ring; whole pages go to the pool."""
        width, scheme, store = self.windows.tail_tokens, self.schemes[layer], self.layers[layer]
        begin, end = (sealed_tokens(self.windows, n) for n in (self.length, self.length + counts))
        # Everything from the first unsealed token on, in order: what the ring holds, then the new tokens.
        inside = (width + settled.shape[3]) // PAGE_TOKENS * PAGE_TOKENS
        position = begin[:, None] + torch.arange(inside + width, device=self.device)
        waiting = ring.staged(store.tail, settled, position, self.length)
        page = begin[:, None] // PAGE_TOKENS + torch.arange(inside // PAGE_TOKENS, device=self.device)
        entry = place(self.block_table, page, page * PAGE_TOKENS < end[:, None], self.pages_per_block)
        k, v = ring.as_pages(waiting[:, :, :, :inside])
        who = self.implementation
        ops.write_pages(scheme.text, scheme.centred, k, v, store.pool, entry.flatten(), implementation=who)
        store.tail.copy_(ring.take(waiting, ring.held_positions(end, width) - begin[:, None]))

    def _write_tokens(self, layer: int, k: Tensor, v: Tensor, entry: Tensor, valid: Tensor | None) -> Tensor:
        """Encode tokens at slots ``entry[B, T]`` of the pool; how many values were not finite, ``[H, B * T]``."""
        ring.refuse_nonfinite(k, v, valid)
        scheme, pool = self.schemes[layer], self.layers[layer].pool
        return ops.write_kv(
            scheme.text, scheme.arrays, k.flatten(0, 1), v.flatten(0, 1), pool, entry.flatten(),
            implementation=self.implementation,
        )  # fmt: skip

    def _flush(self, layer: int, tail: Tensor, start: Tensor, page: Tensor) -> None:
        """Encode one page a row from ``tail[2, R, H, W, D]``."""
        scheme, pool = self.schemes[layer], self.layers[layer].pool
        ops.flush_group(
            scheme.text, scheme.arrays, tail[0], tail[1], pool, start, page, implementation=self.implementation
        )
