"""A layer of a quantized cache as transformers looks at it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

if TYPE_CHECKING:
    from torch_bridge.hf import JkvCache

Pair = tuple[Tensor, Tensor]


class JkvLayer(CacheLayerMixin):
    """One layer of a :class:`JkvCache`, as transformers looks at it; the cache has the tokens of all layers."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: JkvCache, index: int):
        super().__init__()
        self.owner, self.index = owner, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the cache makes the memory of all layers with the first tokens."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Pair:
        return self.owner.update(key_states, value_states, self.index, *args, **kwargs)

    def get_seq_length(self) -> int:
        return self.owner.get_seq_length(self.index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.get_mask_sizes(query_length, self.index)

    def get_max_length(self) -> int:
        return self.owner.get_max_length()

    def get_max_cache_shape(self) -> int:
        """:meth:`get_max_length` as transformers 4 calls it."""
        return self.get_max_length()
