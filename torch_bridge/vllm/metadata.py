"""Once a step: vLLM's metadata to a :class:`torch_bridge.vllm.batch.Step`, in memory that a CUDA graph may hold."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from typing import Any, ClassVar

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder

from jkv.errors import JkvError
from torch_bridge.backends import find
from torch_bridge.vllm.batch import Batch, Step
from torch_bridge.vllm.config import device as device_in_use
from torch_bridge.vllm.config import required, slots_in
from torch_bridge.vllm.persistent import Persistent
from torch_bridge.vllm.plan import plan
from torch_bridge.vllm.replays import Replays
from torch_bridge.vllm.slots import Slots

_LOOKED_AT = 512  # steps between looks at a count on a GPU


class JkvMetadata(AttentionMetadata):
    """A step of one group of layers."""

    def __init__(self, step: Step):
        self.step = step
        self.num_actual_tokens = step.tokens


class JkvMetadataBuilder(AttentionMetadataBuilder[JkvMetadata]):
    """Steps for layers of one format that share block tables."""

    reorder_batch_threshold: int | None = 1
    supports_update_block_table: bool = False
    built: ClassVar[int] = 0

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        impls: list[Any] = [layer.impl for layer in layers.values()]
        if any(getattr(impl, "served", None) is None for impl in impls):
            raise JkvError(f"attention layers {', '.join(layer_names)} are of a kind that jkv does not serve")
        self.slots: Slots | None = None
        rows, depth = slots_in(vllm_config)
        if any(impl.served.waiting is not None for impl in impls):
            self.slots = Slots(rows, depth, device)
        kinds = Counter(impl.served.scheme.description.spec for impl in impls)
        found = ", ".join(f"{count} of {spec}" for spec, count in kinds.items())
        where = "" if self.slots is None else f", {self.slots.count} unfinished pages in BF16"
        logging.getLogger("vllm.jkv").info("jkv serves attention layers: %s%s", found, where)
        most = max(rows, *(vllm_config.compilation_config.cudagraph_capture_sizes or (0,)))
        self._replays: Replays | None = None
        if device.type == "cuda":
            self._replays = Replays(self.slots, Persistent(most, device), most, device)
        self._steps, self._lost = 0, torch.zeros((), dtype=torch.int64)
        if device.type != "cpu":
            self._lost = self._lost.pin_memory()

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Launched kernels can be captured; the other implementations compute with values on the host."""
        where = device_in_use()
        if where.type != "cuda":
            return AttentionCGSupport.NEVER
        launched = hasattr(find(where, required(vllm_config).implementation), "rows")
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if launched else AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> JkvMetadata:
        del common_prefix_len, fast_build
        return self._made(common_attn_metadata, idle=False)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> JkvMetadata:
        """Rows of a capture are nobody's: slots stay as they are. Plans for as many rows are recorded beside."""
        return self._made(common_attn_metadata, idle=True)

    def _made(self, common: Any, idle: bool) -> JkvMetadata:
        if common.causal is not True:
            raise JkvError("attention that is not causal is not possible with jkv's schemes")
        JkvMetadataBuilder.built += 1
        start = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        counts = [end - begin for begin, end in itertools.pairwise(start)]
        batch = Batch(
            counts,
            common.seq_lens[: common.num_reqs],
            common.seq_lens_cpu_upper_bound,
            common.block_table_tensor[: common.num_reqs],
            common.slot_mapping,
            self.kv_cache_spec.block_size,
        )
        step = self._planned(batch, idle)
        self._look()
        return JkvMetadata(step)

    def _planned(self, batch: Batch, idle: bool) -> Step:
        """The step of a batch: recorded where such a batch has been captured, else operation by operation."""
        if self._replays is None:
            return plan(batch, self.slots, idle)
        replayed = None if idle else self._replays.step(batch)
        if replayed is not None:
            return replayed
        step = self._replays.kept.hold(plan(batch, self.slots, idle))
        if idle and not torch.cuda.is_current_stream_capturing():
            self._replays.learn(batch)
        return step

    def _look(self) -> None:
        """Refuse to go on where a request's page was given away: on a GPU this is seen a while later."""
        if self.slots is None:
            return
        self._steps += 1
        if self.device.type == "cpu":
            self._lost = self.slots.lost
        elif self._steps % _LOOKED_AT == 0:
            self._lost.copy_(self.slots.lost, non_blocking=True)
        if self._lost > 0:
            raise JkvError(
                f"{int(self._lost)} unfinished pages were given to other requests while theirs waited; raise "
                "max_num_seqs"
            )
