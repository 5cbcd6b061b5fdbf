"""Decode attention of one layer over a full cache: jkv's kernels, and vLLM's own low-bit ones from the installed wheel.

Every function takes a :class:`Case` and gives what runs one step. Queries, lengths and block tables are as vLLM hands
them to a backend: int32, blocks in random order from 1, block 0 nobody's. Caches are filled by each kernel's own write.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
import vllm_memory
from torch import Tensor

from jkv.options import AttentionOptions
from torch_bridge.backends import find
from torch_bridge.binding import bind_layers
from torch_bridge.describe import describe_layers
from torch_bridge.launched.rows import RowLaunches
from torch_bridge.store import Scheme
from torch_bridge.vllm.batch import Singles
from torch_bridge.vllm.layer import ServedLayer
from torch_bridge.vllm.model import _served

Step = Callable[[], object]
_PAGE = 16  # tokens of a block, as vLLM has it
_OURS = 64
_SAMPLED = 128  # blocks that are written, the others are copies


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    context: int
    heads: int = 8
    group: int = 4
    dim: int = 128
    implementation: str | None = None

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    def query(self) -> Tensor:
        return torch.randn(self.batch, self.heads * self.group, self.dim, device="cuda", dtype=torch.bfloat16)

    def tokens(self, count: int) -> tuple[Tensor, Tensor]:
        k, v = (torch.randn(count, self.heads, self.dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return k, v

    def blocks(self, tokens: int) -> int:
        """Blocks of all sequences, and one that is nobody's."""
        return self.batch * (self.context // tokens) + 1

    def table(self, tokens: int, spare: int = 0) -> Tensor:
        order = 1 + torch.randperm(self.blocks(tokens) - 1, device="cuda")
        table = order.to(torch.int32).view(self.batch, -1)
        return torch.cat([table, table[:, :spare]], dim=1).contiguous()

    def lengths(self, more: int = 0) -> Tensor:
        return torch.full((self.batch,), self.context + more, dtype=torch.int32, device="cuda")


def ours(spec: str, case: Case) -> Step:
    """With the pages that a sequence has filled, and the one after them in BF16."""
    (description,) = describe_layers(spec, case.dim, 1)
    description = _served(description)
    (bound,) = bind_layers([description], None, case.heads, device="cuda")
    scheme = Scheme.of(description, bound)
    waits, waiting = description.windows.tail_tokens > 0, None
    if waits:
        waiting = torch.zeros(2, case.batch, case.heads, 32, case.dim, device="cuda", dtype=torch.bfloat16)
    size = _OURS // 32 * description.page.nbytes
    pool = torch.zeros(case.blocks(_OURS), case.heads, size, dtype=torch.uint8, device="cuda")
    served = ServedLayer(scheme, waiting, None, case.implementation, "cuda")
    first = min(_SAMPLED, len(pool))
    vllm_memory._encode(served, pool[:first], torch.bfloat16)
    vllm_memory._repeat(pool, None, first)
    row = torch.arange(case.batch, dtype=torch.int32, device="cuda")
    zero, one = torch.zeros_like(row), torch.ones_like(row)
    more = 1 if waits else 0
    rows = Singles(
        block_table=case.table(_OURS, spare=1), total=case.lengths(more), sealed=case.lengths(), place=row, offset=zero,
        page=zero - 1, live=one > 0, active=one, slot=zero,
    )  # fmt: skip
    layer = RowLaunches(find(pool.device, case.implementation), scheme, AttentionOptions(), waiting)
    q = case.query()
    out = torch.empty_like(q)

    def step() -> None:
        assert layer.attend(q, pool, rows, out)

    return step


def turboquant(case: Case) -> Step:
    """``turboquant_4bit_nc``."""
    from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
    from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
    from vllm.v1.attention.ops.triton_turboquant_decode import triton_turboquant_decode_attention
    from vllm.v1.attention.ops.triton_turboquant_store import triton_turboquant_store

    config = TurboQuantConfig.from_cache_dtype("turboquant_4bit_nc", case.dim)
    turn = _hadamard(case.dim)
    centroids = get_centroids(case.dim, config.centroid_bits).to("cuda", torch.float32)
    ordered, _ = centroids.sort()
    shape = (case.blocks(_PAGE), _PAGE, case.heads, config.slot_size_aligned)
    cache = torch.zeros(shape, dtype=torch.uint8, device="cuda")
    k, v = case.tokens(_SAMPLED * _PAGE)
    slots = torch.arange(len(k), dtype=torch.int32, device="cuda")
    triton_turboquant_store(
        k, v, cache, slots, turn, (ordered[:-1] + ordered[1:]) / 2, mse_bits=config.key_mse_bits,
        key_packed_size=config.key_packed_size, value_quant_bits=config.effective_value_quant_bits,
    )  # fmt: skip
    vllm_memory._repeat(cache, None, _SAMPLED)
    q, table, lengths = case.query(), case.table(_PAGE), case.lengths()
    splits, heads = 32, case.heads * case.group
    buffers = {
        "mid_o_buf": torch.empty(case.batch, heads, splits, case.dim + 1, device="cuda"),
        "output_buf": torch.empty_like(q),
        "lse_buf": torch.empty(case.batch, heads, device="cuda"),
    }
    return lambda: triton_turboquant_decode_attention(
        q, cache, table, lengths, turn, centroids, case.scale, config.key_mse_bits, config.key_packed_size,
        config.effective_value_quant_bits, norm_correction=config.norm_correction, PiT=turn, max_num_kv_splits=splits,
        **buffers,
    )  # fmt: skip


def int4(case: Case, split: bool) -> Step:
    """``int4_per_token_head``, with or without programs that share a sequence."""
    from vllm.v1.attention.ops.int4_per_token_head import reshape_and_cache_int4, unified_attention_int4

    importlib.import_module("vllm._custom_ops")  # its Hadamard transform is faster than the one in Triton

    half = case.dim // 2 + 4  # codes, and a scale behind them
    cache = torch.zeros(case.blocks(_PAGE), _PAGE, case.heads, 2 * half, dtype=torch.uint8, device="cuda")
    keys, values = cache.split(half, dim=-1)
    number = cache.view(torch.float32)
    scales = {"k_scale_cache": number[..., half // 4 - 1], "v_scale_cache": number[..., half // 2 - 1]}
    k, v = case.tokens(_SAMPLED * _PAGE)
    reshape_and_cache_int4(k, v, keys, values, torch.arange(len(k), device="cuda"), **scales)
    vllm_memory._repeat(cache, None, _SAMPLED)
    q, segments, heads = case.query(), 16, case.heads * case.group
    parts: dict[str, Any] = {}
    if split:
        lead = (case.batch, heads, segments)
        parts = {
            "seq_threshold_3D": case.batch,
            "num_par_softmax_segments": segments,
            "softmax_segm_output": torch.empty(*lead, case.dim, device="cuda"),
            "softmax_segm_max": torch.empty(*lead, device="cuda"),
            "softmax_segm_expsum": torch.empty(*lead, device="cuda"),
        }
    nothing = ("sinks", "alibi_slopes", "qq_bias", "output_scale", "mm_prefix_range")
    fixed = {
        "cu_seqlens_q": torch.arange(case.batch + 1, dtype=torch.int32, device="cuda"),
        "max_seqlen_q": 1,
        "seqused_k": case.lengths(),
        "max_seqlen_k": case.context,
        "softmax_scale": case.scale,
        "window_size": (-1, -1),
        "block_table": case.table(_PAGE),
        "softcap": 0.0,
        "use_alibi_sqrt": False,
    }
    given = fixed | dict.fromkeys(nothing) | scales | parts
    out = torch.empty_like(q)
    return lambda: unified_attention_int4(q, keys, values, out, **given)


def flash(case: Case) -> Step:
    """FlashAttention 3 over BF16, as vLLM calls it."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    cache = torch.empty(2, case.blocks(_PAGE), _PAGE, case.heads, case.dim, dtype=torch.bfloat16, device="cuda")
    vllm_memory._repeat(cache.flatten(), vllm_memory._values)
    q = case.query()
    given = {
        "max_seqlen_q": 1,
        "cu_seqlens_q": torch.arange(case.batch + 1, dtype=torch.int32, device="cuda"),
        "max_seqlen_k": case.context,
        "seqused_k": case.lengths(),
        "block_table": case.table(_PAGE),
        "softmax_scale": case.scale,
        "causal": True,
        "fa_version": 3,
        "out": torch.empty_like(q),
    }
    return lambda: flash_attn_varlen_func(q=q, k=cache[0], v=cache[1], **given)


def _hadamard(size: int) -> Tensor:
    found = torch.ones(1, 1)
    while len(found) < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)], 0)
    return (found / size**0.5).to("cuda")
