"""What people would otherwise use on the same GPU: torch, FlashInfer and vLLM, each imported only when asked for.

A baseline that is not installed, or fails, is reported as such and never stops a run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

from pallas_kernels.bench.cases import BenchCase
from pallas_kernels.bench.result import reason
from pallas_kernels.bench.timing import Timing, time_torch

_CACHE_BYTES = 256 << 20  # inputs that take turns exceed this, so none is read from the L2
_MOST_SETS = 16
_PAGE = 32  # tokens of a page of the paged baselines; vLLM's FP8 kernel takes no fewer
_WORKSPACE = 128 << 20  # bytes, what FlashInfer asks for
_VLLM_GRID, _VLLM_SEGMENTS = 128, 16  # vLLM splits sequences where the grid would be smaller than this, into so many


class Baseline(NamedTuple):
    """A kernel of somebody else: the module it needs, the format it reads, and how it is timed."""

    module: str
    scheme: str
    name: str
    measure: Callable[[BenchCase], Timing]


class Outcome(NamedTuple):
    """A timing, or why there is none."""

    timing: Timing | None
    why: str


def missing(baseline: Baseline) -> str:
    """Why a baseline cannot run here at all, or an empty string."""
    if importlib.util.find_spec(baseline.module) is None:
        return f"{baseline.module} is not installed"
    try:
        import torch

        return "" if torch.cuda.is_available() else "torch sees no GPU"
    except Exception as error:  # a broken installation
        return f"torch cannot be used: {error}"


def measure(baseline: Baseline, case: BenchCase) -> Outcome:
    """Time one baseline at the shape of ``case``; whatever goes wrong becomes a sentence."""
    try:
        import torch

        try:
            return Outcome(baseline.measure(case), "")
        finally:
            torch.cuda.empty_cache()
    except Exception as error:  # other people's packages may raise anything, and a benchmark has to go on
        return Outcome(None, reason(error))


def _sets(case: BenchCase) -> int:
    size = 4 * case.batch * case.context * case.num_kv_heads * case.head_dim
    return max(1, min(_MOST_SETS, -(-_CACHE_BYTES // size)))


def _random(*shape: int) -> Any:
    import torch

    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def _sdpa(backend: str) -> Callable[[BenchCase], Timing]:
    """``scaled_dot_product_attention`` on contiguous ``[B, H, N, D]`` BF16: no paging, all rows of one length."""

    def measure(case: BenchCase) -> Timing:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        kv = (case.batch, case.num_kv_heads, case.context, case.head_dim)
        sets = [(_random(*kv), _random(*kv)) for _ in range(_sets(case))]
        q = _random(case.batch, case.num_q_heads, 1, case.head_dim)

        def call(i: int) -> Any:
            k, v = sets[i % len(sets)]
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=case.group > 1)

        with torch.inference_mode(), sdpa_kernel([getattr(SDPBackend, backend)]):
            return time_torch(call)

    return measure


def _flashinfer(case: BenchCase) -> Timing:
    import torch
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    pages = -(-case.context // _PAGE)
    count = case.batch * pages
    pools = [_random(count, 2, _PAGE, case.num_kv_heads, case.head_dim) for _ in range(_sets(case))]
    q = _random(case.batch, case.num_q_heads, case.head_dim)
    ends = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda") * pages
    order = torch.randperm(count, device="cuda").to(torch.int32)
    last = torch.full((case.batch,), case.context - (pages - 1) * _PAGE, dtype=torch.int32, device="cuda")
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    heads = (case.num_q_heads, case.num_kv_heads, case.head_dim)
    wrapper.plan(ends, order, last, *heads, _PAGE, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    return time_torch(lambda i: wrapper.run(q, pools[i % len(pools)]))


def _vllm(fp8: bool) -> Callable[[BenchCase], Timing]:
    """vLLM's Triton unified attention over its own paged layout ``[blocks, page, H, D]``."""

    def measure(case: BenchCase) -> Timing:
        import torch
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        pages = -(-case.context // _PAGE)
        count = case.batch * pages
        sets = []
        for _ in range(_sets(case)):
            k, v = (_random(count, _PAGE, case.num_kv_heads, case.head_dim) for _ in range(2))
            sets.append((k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)) if fp8 else (k, v))
        q = _random(case.batch, case.num_q_heads, case.head_dim)
        out = torch.empty_like(q)
        table = torch.randperm(count, device="cuda").to(torch.int32).reshape(case.batch, pages)
        ends = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda")
        lengths = torch.full((case.batch,), case.context, dtype=torch.int32, device="cuda")
        one = torch.ones(case.batch, case.num_kv_heads, device="cuda") if fp8 else None
        most = _VLLM_GRID // case.num_kv_heads
        partial = torch.empty(max(most, 1), case.num_q_heads, _VLLM_SEGMENTS, case.head_dim, device="cuda")
        top, total = torch.empty_like(partial[..., 0]), torch.empty_like(partial[..., 0])

        def call(i: int) -> None:
            k, v = sets[i % len(sets)]
            unified_attention(
                q=q,
                k=k,
                v=v,
                out=out,
                cu_seqlens_q=ends,
                max_seqlen_q=1,
                seqused_k=lengths,
                max_seqlen_k=case.context,
                softmax_scale=case.head_dim**-0.5,
                causal=True,
                window_size=(-1, -1),
                block_table=table,
                softcap=0.0,
                q_descale=None,
                k_descale=one,
                v_descale=one,
                seq_threshold_3D=most,
                num_par_softmax_segments=_VLLM_SEGMENTS,
                softmax_segm_output=partial,
                softmax_segm_max=top,
                softmax_segm_expsum=total,
            )

        return time_torch(call)

    return measure


BASELINES = (
    Baseline("torch", "bf16", "torch SDPA cuDNN", _sdpa("CUDNN_ATTENTION")),
    Baseline("torch", "bf16", "torch SDPA flash", _sdpa("FLASH_ATTENTION")),
    Baseline("flashinfer", "bf16", "FlashInfer", _flashinfer),
    Baseline("vllm", "bf16", "vLLM Triton unified", _vllm(fp8=False)),
    Baseline("vllm", "fp8", "vLLM Triton unified", _vllm(fp8=True)),
)
MODULES = tuple(dict.fromkeys(baseline.module for baseline in BASELINES))
