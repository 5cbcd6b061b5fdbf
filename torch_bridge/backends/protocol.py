"""What an implementation of the ops has to have: exactly these functions, as :mod:`torch_bridge.reference` has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from jkv.options import AttentionOptions
from torch_bridge.description import Description
from torch_bridge.operands import Calibs
from torch_bridge.reference.place import Exact
from torch_bridge.store import Step

if TYPE_CHECKING:
    from torch_bridge.cache import PagedCache
    from torch_bridge.vllm.batch import Singles


class Steps(Protocol):
    """Decoding steps of one cache that an implementation has prepared; False and None leave the work to the ops.

    ``decode`` may quantize the page that the step fills; ``flush`` does it in the other layers.
    """

    def numbers(self, cache: PagedCache, counts: Tensor | None) -> Step | None: ...

    def decode(
        self,
        cache: PagedCache,
        index: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: Step,
        options: AttentionOptions | None,
    ) -> Tensor | None: ...

    def append(self, cache: PagedCache, index: int, k: Tensor, v: Tensor, step: Step) -> bool: ...

    def attend(
        self, cache: PagedCache, index: int, q: Tensor, step: Step, options: AttentionOptions | None
    ) -> Tensor | None: ...

    def flush(self, cache: PagedCache, step: Step) -> bool: ...

    def count(self, cache: PagedCache) -> None: ...


class Rows(Protocol):
    """Rows of one token of one layer, over memory that an engine owns; False leaves the work to the ops.

    ``write`` keeps a token a row, ``k, v: [R, H, D]``, and quantizes what is full with it; ``attend`` is attention of
    ``q[R, Hq, D]`` at those tokens, into ``out``; ``nonfinite`` is how many values were stored as zero so far.
    """

    def write(self, k: Tensor, v: Tensor, pool: Tensor, rows: Singles) -> bool: ...

    def attend(self, q: Tensor, pool: Tensor, rows: Singles, out: Tensor) -> bool: ...

    def nonfinite(self) -> Tensor: ...


class Backend(Protocol):
    """An implementation of the ops, for one device.

    Whoever calls has run the checks of metadata (:mod:`torch_bridge.checks`), so dtypes, shapes and devices fit and the
    pool is contiguous; other operands may be views with any strides. Descriptions of one scheme are one object, and
    tensors of ``calib`` the same ones from step to step. Pools are updated in place, on torch's current stream. No
    result shares memory with an operand. An implementation may have ``steps(cache)``, which prepares those of a cache
    (:class:`Steps`), and ``rows(scheme, options, waiting)``, which prepares those of an engine's layer (:class:`Rows`)
    and says by that that CUDA graphs can hold what it does. ``read_pages(description, calib, pool, page, row, k, v)``
    puts pages ``page: int32[P]`` into rows ``row[p] .. row[p] + 32`` of ``k, v: [N, H, D]``, where there is one. What
    is said here holds for values on a GPU, which nobody has looked at: a slot, page or block outside the pool is never
    followed.
    """

    def prepare_query(
        self,
        description: Description,
        calib: Calibs,
        q: Tensor,
        num_kv_heads: int,
        options: AttentionOptions | None = None,
    ) -> Tensor:
        """:func:`torch_bridge.reference.prepare_query`."""
        ...

    def write_kv(
        self, description: Description, calib: Calibs, k: Tensor, v: Tensor, pool: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        """:func:`torch_bridge.reference.write_kv`."""
        ...

    def write_pages(
        self, description: Description, calib: Calibs, k: Tensor, v: Tensor, pool: Tensor, page: Tensor
    ) -> Tensor:
        """:func:`torch_bridge.reference.write_pages`."""
        ...

    def flush_group(
        self,
        description: Description,
        calib: Calibs,
        tail_k: Tensor,
        tail_v: Tensor,
        pool: Tensor,
        start: Tensor,
        page: Tensor,
    ) -> None:
        """:func:`torch_bridge.reference.flush_group`."""
        ...

    def append_tail(
        self,
        k: Tensor,
        v: Tensor,
        tail: Tensor,
        sinks: Tensor,
        nonfinite: Tensor,
        length: Tensor,
        mean: Tensor | None = None,
        active: Tensor | None = None,
    ) -> None:
        """:func:`torch_bridge.reference.append_tail`; a backend that lacks it gets that one."""
        ...

    def paged_attention(
        self,
        description: Description,
        calib: Calibs,
        q: Tensor,
        pool: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        *,
        sealed: Tensor | None = None,
        exact: Exact | None = None,
        counts: Tensor | None = None,
        start: Tensor | None = None,
        options: AttentionOptions | None = None,
    ) -> Tensor:
        """:func:`torch_bridge.reference.paged_attention`: of one query a row, or of a chunk ``exact.fresh``."""
        ...

    def dequantize_pages(
        self, description: Description, calib: Calibs, pool: Tensor, block_table: Tensor
    ) -> tuple[Tensor, Tensor]:
        """:func:`torch_bridge.reference.dequantize_pages`."""
        ...
