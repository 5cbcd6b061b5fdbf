"""An engine made of lists: requests, blocks in random order, and steps of any rows, driven through plan and layer.

What a step's attention has to be is computed by plain code from the tokens of each request: pages that were full before
the step as the scheme stores them, the rest as BF16 holds it, a chunk as it came.
"""

from __future__ import annotations

import dataclasses
import random

import torch
from torch import Tensor

from jkv.options import AttentionOptions
from jkv.plan import plan_layers
from jkv.registry import parse
from jkv.units import PAGE_TOKENS
from tests import cases
from torch_bridge import ops
from torch_bridge.binding import to_tensors
from torch_bridge.describe import describe_layers
from torch_bridge.reference.floats import to_bf16
from torch_bridge.store import Scheme
from torch_bridge.vllm.batch import Batch
from torch_bridge.vllm.layer import ServedLayer
from torch_bridge.vllm.plan import plan
from torch_bridge.vllm.slots import Slots

HEADS = 2
GROUP = 2


@dataclasses.dataclass(eq=False)
class Request:
    """All tokens that it will ever have, how many of them are computed, and where they lie."""

    q: Tensor  # [T, Hq, D]
    k: Tensor  # [T, H, D]
    v: Tensor
    computed: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)


class Engine:
    """One layer of a scheme, ``rows`` running requests at most."""

    def __init__(
        self,
        spec: str,
        *,
        rows: int = 8,
        blocks: int = 64,
        block_tokens: int = 64,
        depth: int = 1,
        dim: int = 64,
        options: AttentionOptions | None = None,
        implementation: str | None = None,
        seed: int = 0,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        scheme = parse(spec)
        (description,) = describe_layers(scheme, dim, 1)
        (part,) = plan_layers(scheme, 1).layers
        bound = cases.bound(part, dim, HEADS)
        self.scheme = Scheme.of(description, to_tensors(bound))  # of what is expected, on the CPU
        self.dim, self.block_tokens, self.options = dim, block_tokens, options or AttentionOptions()
        self.device, self.dtype = device, dtype
        self.slots = Slots(rows, depth, device) if description.windows.tail_tokens else None
        waiting = None
        if self.slots is not None:
            shape = (2, self.slots.places, HEADS, PAGE_TOKENS, dim)
            waiting = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
        served = Scheme.of(description, to_tensors(bound, device))
        self.layer = ServedLayer(served, waiting, self.options, implementation, device)
        size = block_tokens // PAGE_TOKENS * description.page.nbytes
        self.pool = torch.zeros(blocks, HEADS, size, dtype=torch.uint8, device=device)
        self.random = random.Random(seed)
        self.free = list(range(1, blocks))
        self.random.shuffle(self.free)
        self.generator = torch.Generator().manual_seed(seed)

    def request(self, tokens: int) -> Request:
        def normal(heads: int) -> Tensor:
            return torch.randn(tokens, heads, self.dim, generator=self.generator)

        mean = 0.0 if self.scheme.mean is None else self.scheme.mean
        made = (normal(HEADS * GROUP), normal(HEADS) + mean, normal(HEADS))
        return Request(*(x.to(self.dtype) for x in made))

    def release(self, request: Request) -> None:
        """What a preemption, an end or a cancellation does: blocks go, in any order, and nobody is told."""
        self.free += request.blocks
        self.random.shuffle(self.free)
        request.blocks, request.computed = [], 0

    def step(self, rows: list[tuple[Request, int]], padding: int = 0, check: bool = True) -> Tensor:
        """Compute ``count`` more tokens of every row; ``padding`` rows behind. The result, ``[tokens, Hq, D]``."""
        rows = self.take(rows)
        batch, (q, k, v) = self.batch(rows, padding)
        step = plan(batch, self.slots)
        out = torch.full_like(q, 7.0)
        self.layer.write(k, v, self.pool, step)
        self.layer.attend(q, k, v, self.pool, step, out)
        self.finish(rows, out, check)
        return out

    def take(self, rows: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """The rows in the order of an engine, with blocks for their tokens."""
        rows = sorted(rows, key=lambda row: row[1] > 1)
        for request, count in rows:
            while len(request.blocks) * self.block_tokens < request.computed + count:
                request.blocks.append(self.free.pop())
        return rows

    def finish(self, rows: list[tuple[Request, int]], out: Tensor, check: bool = True) -> None:
        """Compare the step's result, and count its tokens."""
        if check:
            at, near = 0, 2e-3 if self.dtype == torch.float32 else 3e-2
            found = out.to("cpu", torch.float32)
            for request, count in rows:
                torch.testing.assert_close(found[at : at + count], self.expected(request, count), rtol=near, atol=near)
                at += count
        for request, count in rows:
            request.computed += count
        if self.slots is not None:
            assert int(self.slots.lost) == 0

    def batch(self, rows: list[tuple[Request, int]], padding: int) -> tuple[Batch, list[Tensor]]:
        width = max(len(request.blocks) for request, _ in rows) + 1
        table = torch.zeros(len(rows) + padding, width, dtype=torch.int32)
        lengths = torch.zeros(len(rows) + padding, dtype=torch.int32)
        slots: list[int] = []
        for row, (request, count) in enumerate(rows):
            table[row, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
            if self.options.window is not None:  # an engine takes back blocks that nobody sees any more
                table[row, : max(request.computed + 1 - self.options.window, 0) // self.block_tokens] = 0
            lengths[row] = request.computed + count
            for position in range(request.computed, request.computed + count):
                block = request.blocks[position // self.block_tokens]
                slots.append(block * self.block_tokens + position % self.block_tokens)
        tensors = []
        for name in "qkv":
            parts = [getattr(request, name)[request.computed : request.computed + count] for request, count in rows]
            extra = torch.full((padding, *parts[0].shape[1:]), torch.nan, dtype=self.dtype)
            tensors.append(torch.cat([*parts, extra]))
        slot_mapping = torch.tensor(slots + [-1] * padding, dtype=torch.int64)
        counts = [count for _, count in rows] + [0] * padding
        moved = (x.to(self.device) for x in (lengths, table, slot_mapping))
        on_device, blocks, where = moved
        batch = Batch(counts, on_device, lengths, blocks, where, self.block_tokens)
        return batch, [x.to(self.device) for x in tensors]

    def expected(self, request: Request, count: int) -> Tensor:
        """The attention of the next ``count`` tokens of a request."""
        before, total = request.computed, request.computed + count
        k, v = self.stored(request, total, before, count)
        q = request.q[before:total].unflatten(1, (HEADS, -1)).permute(1, 2, 0, 3).to(torch.float64)
        scores = q @ k[:, None].mT.to(torch.float64) * self.options.score_scale(self.dim)
        position, stands = torch.arange(total), torch.arange(before, total)[:, None]
        seen = position <= stands
        if self.options.window is not None:
            seen &= position > stands - self.options.window
        if self.options.softcap is not None:
            scores = torch.tanh(scores / self.options.softcap) * self.options.softcap
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.options.sink_logits is not None:
            logits = self.options.sink_logits.to(torch.float64).view(HEADS, -1, 1, 1).expand(-1, -1, count, 1)
            scores = torch.cat([scores, logits], dim=-1)
        weights = scores.softmax(-1)[..., :total]
        return (weights @ v[:, None].to(torch.float64)).permute(2, 0, 1, 3).flatten(1, 2).to(torch.float32)

    def stored(self, request: Request, total: int, before: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values as a query of this step has to see them, ``[H, total, D]``."""
        found = [x[:total].transpose(0, 1).to(torch.float32, copy=True) for x in (request.k, request.v)]
        if self.slots is None:
            inside = total if count == 1 else before
        else:
            inside = before // PAGE_TOKENS * PAGE_TOKENS
            upto = total if count == 1 else before  # a row's only token is read as it waits
            mean = 0.0 if self.scheme.mean is None else self.scheme.mean[:, None]
            found[0][:, inside:upto] = to_bf16(found[0][:, inside:upto] - mean) + mean
            found[1][:, inside:upto] = to_bf16(found[1][:, inside:upto])
        for x, read in zip(found, self._encoded(request, inside), strict=True):
            x[:, :inside] = read[:, :inside]
        return found[0], found[1]

    def _encoded(self, request: Request, count: int) -> tuple[Tensor, Tensor]:
        """The first tokens of a request as a pool of their own gives them back."""
        pages = -(-count // PAGE_TOKENS)
        own = torch.zeros(max(pages, 1), HEADS, self.scheme.description.page.nbytes, dtype=torch.uint8)
        if self.slots is None:
            ops.write_kv(
                self.scheme.text, self.scheme.arrays, request.k[:count], request.v[:count], own, torch.arange(count)
            )
        elif pages:
            k, v = (x[:count].unflatten(0, (pages, PAGE_TOKENS)) for x in (request.k, request.v))
            ops.write_pages(self.scheme.text, self.scheme.arrays, k, v, own, torch.arange(pages))
        k, v = ops.dequantize_pages(self.scheme.text, self.scheme.arrays, own, torch.arange(max(pages, 1))[None])
        return k[0], v[0]
