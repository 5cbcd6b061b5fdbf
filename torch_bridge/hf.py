"""A quantized KV cache for transformers: ``model.generate(..., past_key_values=JkvCache(spec, calib, config=...))``.

What is stored is packed pages and the BF16 tokens that the scheme leaves exact, nothing else. With attention
implementation ``"jkv"`` (:mod:`torch_bridge.hf_attention`) attention reads the pages; with any other one a layer's keys
and values are dequantized for the moment, with the same results (but for ``query=fp8``, which only pages know of).

One query a row reads what the cache holds, itself included, as :func:`jkv.attend.attend` does after an append. Several
(a prompt, candidates of assisted decoding) read what was cached and, unquantized, each other. Padding is never stored.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache

from jkv.calibration import Calibration
from jkv.errors import JkvError
from jkv.options import AttentionOptions
from torch_bridge import hf_attention, rows
from torch_bridge.binding import Bound
from torch_bridge.cache import PagedCache
from torch_bridge.description import Description
from torch_bridge.hf_columns import Columns
from torch_bridge.hf_config import Shape, attention_of, bind_model, describe_model
from torch_bridge.hf_layer import JkvLayer
from torch_bridge.hf_mask import Chunk
from torch_bridge.store import Step

hf_attention.register()

Pair = tuple[Tensor, Tensor]


class JkvCache(Cache):
    """The cache of one batch. Every layer of the model updates it once a forward pass, in order.

    ``store`` (None before the first tokens) is the memory, a :class:`torch_bridge.cache.PagedCache`; ``columns`` says
    which columns of the batch, as transformers counts, are tokens. Layers with a sliding window keep all tokens, and
    see as many of them as it is long.
    """

    def __init__(
        self,
        spec: str | Sequence[Description],
        calib: Calibration | str | os.PathLike[str] | None = None,
        *,
        config: PretrainedConfig,
        max_tokens: int | None = None,
        padding: Tensor | None = None,
        fingerprint: str | None = None,
        implementation: str | None = None,
    ):
        """An empty cache for the model of ``config``, which is ``model.config``.

        Args:
          spec: a scheme, or a description for every layer (which needs no JAX).
          calib: a calibration or the path of one.
          max_tokens: what every row has room for, allocated with the first tokens; by default memory grows with them,
            by a quarter at a time.
          padding: the attention mask of the prompt, ``[batch, tokens]``. Attention implementation ``"jkv"`` knows it;
            any other one keeps it from the cache, so then a batch of several rows must give it.
          fingerprint: that of the model's weights (:func:`torch_bridge.hf_model.fingerprint`), to hold calib against;
            by default ``config.jkv_fingerprint`` where there is one, else only sizes are compared.
          implementation: who computes, :data:`torch_bridge.backends.NAMES`; None is the device's default.

        Raises:
          JkvError: for a spec that jkv or the model's sizes do not allow, a calibration of another model or scheme or a
            missing one, or a model whose layers are no plain attention.
        """
        self.shape = Shape.of(config)
        self.descriptions = describe_model(spec, self.shape)
        self._bound = bind_model(self.descriptions, calib, self.shape, fingerprint)
        if max_tokens is not None and max_tokens < 1:
            raise JkvError(f"max_tokens={max_tokens} is not allowed; it must be at least 1, or None to grow")
        self.config, self.max_tokens, self.implementation = config, max_tokens, implementation
        self.columns = Columns(padding)
        self.store: PagedCache | None = None
        self._next = 0  # the layer whose turn it is
        self._waiting = False  # whether that layer's attention is to come
        self._chunk = Chunk(0)  # what the current pass brings
        self._step: Step | None = None  # where, if it is one column
        super().__init__(layers=[JkvLayer(self, index) for index in range(self.shape.num_layers)])

    @property
    def nbytes(self) -> int:
        """Bytes of the memory: :func:`torch_bridge.store.cache_bytes` of its batch and room."""
        return 0 if self.store is None else self.store.nbytes

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Pair:
        """Take a layer's new ``[B, H, T, D]``; returns what attention needs of all columns.

        For attention implementation ``"jkv"`` these are the new ones, and the cache takes them when attention runs.

        Raises:
          JkvError: for a layer out of turn, tensors that do not fit, or a batch whose padding nobody has told.
        """
        if self._waiting:
            raise JkvError(
                f"attention of layer {self._next} did not run through implementation 'jkv', which config names; give "
                "JkvCache the config of the model that it is used with"
            )
        if layer_idx != self._next:
            raise JkvError(
                f"layer {layer_idx} updates the cache where layer {self._next} is due; every layer does once a pass"
            )
        attention = attention_of(self.config)
        if attention == hf_attention.NAME:
            if layer_idx == 0:
                self._make_room(key_states)
            self._waiting = True
            marked = key_states.view_as(key_states)
            setattr(marked, hf_attention.MARK, (self, layer_idx))
            return marked, value_states
        if layer_idx == 0:
            batch, _, steps, _ = key_states.shape
            positions = kwargs.get("kwargs", {}).get("position_ids")
            chunk = self.columns.declared(batch, steps, key_states.device, attention, positions)
            self._make_room(key_states)
            self._chunk = chunk
        return self._dequantized(layer_idx, key_states, value_states)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tokens: Tensor | None,
        options: AttentionOptions | None = None,
    ) -> Tensor:
        """Write a layer's new ``key, value: [B, H, T, D]`` and attend: ``query[B, Hq, T, D]`` to ``o[B, T, Hq, D]``.

        ``tokens: bool[B, columns + T]`` is False where a column is padding.

        Raises:
          JkvError: as :meth:`update`, and for a mask that changes columns which are cached already.
        """
        assert self.store is not None
        if layer == 0:
            self._chunk = self.columns.masked(tokens, key.shape[2])
        self._waiting = False
        chunk = self._chunk
        q, k, v = (chunk.gather(x.transpose(1, 2)) for x in (query, key, value))
        if chunk.steps == 1:
            out = self.store.decode(layer, q, k, v, self._step_of(layer), options)
        else:
            out = self.store.attend(layer, q, fresh=(k, v), counts=chunk.counts, options=options)
            self.store.prefill(layer, k, v, chunk.counts)
        self._end_layer()
        return chunk.scatter(out)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that are cached, padding among them."""
        return self.columns.count

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[int, int]:
        """Columns of the mask for that many new ones, and the first of them."""
        new = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.columns.count + new, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Room of every row, -1 where it grows."""
        return -1 if self.max_tokens is None else self.max_tokens

    get_max_cache_shape = get_max_length  # the name in transformers 4

    def reset(self) -> None:
        """Forget all tokens, and the padding that was told; the memory stays."""
        if self.store is not None:
            rows.reset(self.store)
        self.columns = Columns()
        self._next, self._waiting = 0, False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` columns, or with a positive number all but the first so many."""
        self._between()
        have = self.columns.count
        keep = tokens_to_remove if tokens_to_remove > 0 else max(have + tokens_to_remove, 0)
        if self.store is not None and keep < have:
            rows.crop(self.store, self.store.length - self.columns.crop(keep))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in the order of beams."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times, side by side."""
        if self.store is not None:
            self.batch_select_indices(torch.arange(self.store.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only the rows ``indices``, in their order; rows that came from one may go on differently."""
        self._between()
        if self.store is None:
            return
        indices = indices.to(self.store.device)
        indices = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self.columns.select(indices, self.store.batch)
        rows.select(self.store, indices)

    def __deepcopy__(self, memo: dict[int, Any]) -> JkvCache:
        """A cache of its own with the same tokens, for another continuation; the model's config is shared."""
        self._between()
        twin = copy.copy(self)
        twin.store, twin.columns = copy.deepcopy(self.store, memo), copy.copy(self.columns)
        twin.layers = [JkvLayer(twin, index) for index in range(len(self.layers))]
        return twin

    def _make_room(self, key: Tensor) -> None:
        """Make or grow the memory for new keys ``[B, H, T, D]``."""
        batch, heads, steps, dim = key.shape
        if (heads, dim) != (self.shape.num_kv_heads, self.shape.head_dim):
            raise JkvError(
                f"keys of {heads} heads and head_dim {dim} are not those of the model {self.shape.name}, whose config "
                f"this cache was given: {self.shape.num_kv_heads} and {self.shape.head_dim}"
            )
        need, store = self.columns.count + steps, self.store
        if store is not None and (batch, key.device) != (store.batch, store.device):
            raise JkvError(
                f"keys of {batch} rows on {key.device} do not fit this cache of {store.batch} rows on {store.device}; "
                "take a new one"
            )
        if self.max_tokens is not None and need > self.max_tokens:
            raise JkvError(f"{need} tokens exceed max_tokens={self.max_tokens} of this cache")
        if store is None:
            self.store = PagedCache(
                self.descriptions,
                [_on(bound, key.device) for bound in self._bound],
                batch=batch,
                max_tokens=self.max_tokens or need,
                num_kv_heads=heads,
                device=key.device,
                implementation=self.implementation,
            )
        elif need > store.max_tokens:
            rows.grow(store, max(need, store.max_tokens * 5 // 4))

    def _dequantized(self, layer: int, key: Tensor, value: Tensor) -> Pair:
        """Write a layer's new keys and values; all columns' as the cache holds them, several new ones as they are."""
        assert self.store is not None
        chunk, before = self._chunk, self.columns.count
        k, v = (chunk.gather(x.transpose(1, 2)) for x in (key, value))
        if chunk.steps == 1:
            self.store.append(layer, k, v, self._step_of(layer))
            found = self._columns(layer, before + 1, key.dtype)
        else:
            old = self._columns(layer, before, key.dtype)
            self.store.prefill(layer, k, v, chunk.counts)
            found = torch.cat([old[0], key], dim=2), torch.cat([old[1], value], dim=2)
        self._end_layer()
        return found

    def _columns(self, layer: int, count: int, dtype: torch.dtype) -> Pair:
        """Keys and values ``[B, H, count, D]`` of the first columns."""
        assert self.store is not None
        k, v = rows.contents(self.store, layer, count)
        return self.columns.spread(k.to(dtype)), self.columns.spread(v.to(dtype))

    def _step_of(self, layer: int) -> Step:
        """What the layers of a pass over one column share."""
        assert self.store is not None
        if layer == 0 or self._step is None:
            self._step = self.store.step(self._chunk.counts)
        return self._step

    def _end_layer(self) -> None:
        """After a layer's attention; after the last one's, count the tokens and quantize the pages that are full."""
        assert self.store is not None
        self._next += 1
        if self._next < len(self.layers):
            return
        counts, steps = self._chunk.counts, self._chunk.steps
        if steps == 1:
            self.store.seal(self._step)
        else:
            self.store.advance(steps if counts is None else counts)
        self.columns.count += steps
        self._next, self._step = 0, None

    def _between(self) -> None:
        if self._next or self._waiting:
            raise JkvError(f"the cache is in the middle of a forward pass, at layer {self._next}; finish it, or reset")


def _on(bound: Bound, device: torch.device) -> Bound:
    return {side: {name: x.to(device) for name, x in arrays.items()} for side, arrays in bound.items()}
