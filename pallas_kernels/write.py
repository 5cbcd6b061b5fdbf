"""Encode tokens and store them where they belong, K and V in one launch: ``tail=0``, and prompts of such caches.

A program takes a few tokens of one KV head, settles them as :func:`jkv.write.settle` does, runs the scheme's own
encoder on the tile and stores every field at its token's slot. The bytes are those of :func:`jkv.store.store`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jkv import page as pages
from jkv.core import PAGE_TOKENS, Array, Scheme
from jkv.errors import JkvError
from pallas_kernels import compat
from pallas_kernels.encoding import (
    Prepared,
    calib_in_kernel,
    check_pool,
    check_range,
    operands,
    prepare,
    settle,
    specs,
    store_entry,
)
from pallas_kernels.geometry import iota
from pallas_kernels.sizes import COUNT, POOL, is_below, size, sizes_of
from pallas_kernels.warp import write as warp_write
from pallas_kernels.warp.writable import at_once, supports

MANY_VALUES = 1 << 21  # from here on there are enough programs, and two passes share what a program does once


@dataclasses.dataclass(frozen=True)
class WriteConfig:
    """How a write kernel is launched: ``tokens`` a program (a power of two) and warps.

    ``kernel="tile"`` encodes whatever the scheme's stages say, from 16 tokens on. ``lane_channels`` shapes its tile:
    that many consecutive channels of a token lie side by side in a warp, 8 of them in one thread; the token's other
    channels are registers of the same threads. ``rows_together`` takes 128 rows of a selector's measure at once instead
    of 64, which AMD's compiler has no registers for. ``kernel="warp"`` has one warp, takes ``1024 / head_dim`` tokens
    at a time and knows bfloat16 rows of some schemes (:mod:`pallas_kernels.warp.write`), on NVIDIA from sm_90 on.
    """

    tokens: int = 16
    num_warps: int = 1
    lane_channels: int = 16
    kernel: Literal["tile", "warp"] = "tile"
    rows_together: bool = False

    def __post_init__(self) -> None:
        tokens = (16, 32, 64, 128) if self.kernel == "tile" else (4, 8, 16, 32, 64, 128)
        warps = (1, 2, 4, 8) if self.kernel == "tile" else (1,)
        allowed = {
            "kernel": ("tile", "warp"),
            "tokens": tokens,
            "num_warps": warps,
            "lane_channels": (8, 16, 32),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise JkvError(f"{name}={getattr(self, name)} is not allowed; {name} must be one of {values}")


def default_config(scheme: Scheme, head_dim: int, dtype: Any = None, size: int = 0, device: Any = None) -> WriteConfig:
    """The warp kernel where the device and the rows, ``size`` values of ``dtype``, allow it; a prompt gets two passes.

    Else 16 tokens a program: enough programs for a decoding step, few enough registers that none spills. A selector
    holds three candidates and its dot products, a rotation two versions of every key: they get more warps. ``device``
    is the first of JAX by default.
    """
    device = device or jax.devices()[0]
    if supports(scheme, head_dim, dtype, size) and _has_warp_kernels(device):
        passes = 2 if size >= MANY_VALUES else 1
        return WriteConfig(passes * at_once(head_dim), kernel="warp")
    wide = max(1, head_dim // 128)
    if _selects(scheme):
        return selector_config(device.device_kind)
    turns = any(stage.turns for codec in (scheme.k, scheme.v) for stage in codec.stages)
    return WriteConfig(16, 2 * wide, 32) if turns or wide > 1 else WriteConfig(16, 1, 16)


def selector_config(device_kind: str) -> WriteConfig:
    """For schemes that decide on rotations as they write: 256 threads, which are four wavefronts on AMD."""
    if device_kind.startswith(("AMD", "gfx")):
        return WriteConfig(16, 4, 16)
    return WriteConfig(16, 8, 32, rows_together=device_kind.startswith("NVIDIA"))


def _selects(scheme: Scheme) -> bool:
    """Whether a scheme decides on rotations as it writes."""
    return scheme.flags != "none" and "choice" not in scheme.k_needs


def _has_warp_kernels(device: Any) -> bool:
    """NVIDIA from sm_90 on: what is older has no comparison of two bfloat16 at a time."""
    kind, capability = device.device_kind, getattr(device, "compute_capability", "0.0")
    return kind.startswith("NVIDIA") and int(str(capability).split(".")[0]) >= 9


def _check_warp(scheme: Scheme, k: Array, tokens: int) -> None:
    head_dim = k.shape[-1]
    if not supports(scheme, head_dim, k.dtype, k.size):
        raise JkvError(
            f"kernel='warp' does not write {scheme.spec!r} from {k.size} values of {k.dtype.name} at head_dim="
            f"{head_dim}; it takes fewer than 2**30 of bfloat16, for integer codes of 2 or 4 bits with 8-bit metadata "
            "per token, raw or turned by fixed flags, at head_dim 64, 128 or 256"
        )
    if tokens % at_once(head_dim):
        raise JkvError(
            f"tokens={tokens} does not fit kernel='warp' at head_dim={head_dim}; tokens must be a multiple of "
            f"{at_once(head_dim)}"
        )
    device = jax.devices()[0]
    if device.platform == "gpu" and not _has_warp_kernels(device):
        raise JkvError(f"kernel='warp' does not run on {device.device_kind}; it needs an NVIDIA GPU from sm_90 on")


def load_rows(ref: Any, *, head: Any, row: Array, live: Array, dim: int, lane_channels: int) -> Array:
    """Rows ``row[T]`` of one head of ``ref: [N, H * D]`` as a tile ``[T, D]``; rows that are not live are zero."""
    shape = (row.shape[0], dim // lane_channels, lane_channels)
    index = head * dim + iota(shape, 1) * lane_channels + iota(shape, 2)
    where = jnp.broadcast_to(live[:, None, None], shape)
    tile = compat.load(ref, row[:, None, None], 0, index, ref.dtype, mask=where, evict="evict_first")
    return tile.reshape(row.shape[0], dim)


def load_mean(ref: Any, head: Any, dim: int) -> Array:
    return compat.load(ref, head, 0, iota((1, dim), 1), jnp.float32)


def _kernel(
    sizes: Any, slots: Any, k_ref: Any, v_ref: Any, *refs: Any, scheme: Scheme, layout: Any, pages_per_block: int,
    prepared: Prepared, config: WriteConfig, num_heads: int, dim: int,
) -> None:  # fmt: skip
    *arrays, _, pool, bad = refs
    head, count = compat.program_id(1), size(sizes, COUNT)
    token = compat.program_id(0) * config.tokens + iota((config.tokens,), 0)
    there = token < count
    slot = compat.load(slots, 0, 0, token, jnp.int32, mask=there, other=-1)
    block_tokens = pages_per_block * PAGE_TOKENS
    live = is_below(slot, size(sizes, POOL) * block_tokens)
    # Rows do not wait for slots: those of a skipped token are read and not stored.
    load = functools.partial(load_rows, head=head, row=token, live=there, dim=dim, lane_channels=config.lane_channels)
    inside = calib_in_kernel(prepared, tuple(arrays), head, config.rows_together)
    # One side after the other: both at once would not fit the registers.
    v, v_wrong = settle(load(v_ref), None)
    v_packed = scheme.v.encode(inside["v"], v)
    mean = load_mean(arrays[list(prepared.k).index("mean")], head, dim) if "mean" in prepared.k else None
    k, k_wrong = settle(load(k_ref), mean)
    compat.store(bad, 0, 0, head * count + token, jnp.where(live, v_wrong + k_wrong, 0), mask=there)
    fields = pages.named(scheme, scheme.k.encode(inside["k"], k), v_packed)
    safe = jnp.maximum(slot, 0)
    block, entry = safe // block_tokens, safe % block_tokens
    for field in layout.fields:
        store_entry(field, pages_per_block, pool, block * num_heads + head, entry, fields[field.name], live)


def write(
    scheme: Scheme,
    calib: Any,
    k: Array,
    v: Array,
    pool: Array,
    slots: Array,
    *,
    config: WriteConfig | None = None,
    interpret: bool | None = None,
) -> tuple[Array, Array]:
    """Encode ``k, v: [N, H, D]`` token by token into ``pool: uint8[num_blocks, H, block bytes]``.

    ``slots: int32[N]`` is ``block * block_tokens + position`` of every token; a negative slot skips it, and inside
    ``jit`` so does one beyond the pool. ``calib`` is one layer of :func:`jkv.calibration.bind`, or
    :func:`pallas_kernels.encoding.prepare` of it. Returns the pool, updated in place where it is donated, and
    ``int32[H, N]``: how many values of a token were not finite (they are stored as zero).

    Raises:
      JkvError: for a scheme that stores whole pages, shapes that do not fit, or (outside ``jit``) a slot out of range.
    """
    if scheme.granularity == "group":
        raise JkvError(f"scheme {scheme.spec!r} encodes whole pages; use flush, or write_pages")
    if k.ndim != 3 or k.shape != v.shape or slots.shape != k.shape[:1]:
        raise JkvError(
            f"k {tuple(k.shape)}, v {tuple(v.shape)} and slots {tuple(slots.shape)} do not fit; they must be "
            "[N, H, D] twice and [N]"
        )
    _, heads, dim = k.shape
    layout, pages_per_block = check_pool(scheme, dim, pool, heads)
    check_range("slots", slots, pool.shape[0] * pages_per_block * PAGE_TOKENS)
    prepared = calib if isinstance(calib, Prepared) else prepare(scheme, calib)
    config = config or default_config(scheme, dim, k.dtype, k.size)
    if interpret is None:
        interpret = jax.default_backend() != "gpu"
    if config.kernel == "warp":
        _check_warp(scheme, k, config.tokens)
        return warp_write.launch(prepared, k, v, pool, slots, scheme, layout, pages_per_block, config.tokens, interpret)
    return _launch(prepared, k, v, pool, slots, scheme, layout, pages_per_block, config, interpret)


@functools.partial(jax.jit, static_argnums=(5, 6, 7, 8, 9))
def _launch(
    prepared: Prepared, k: Array, v: Array, pool: Array, slots: Array, scheme: Scheme, layout: Any,
    pages_per_block: int, config: WriteConfig, interpret: bool,
) -> tuple[Array, Array]:  # fmt: skip
    count, heads, dim = k.shape
    arrays = operands(prepared)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), prepared)
    kernel = functools.partial(
        _kernel, scheme=scheme, layout=layout, pages_per_block=pages_per_block, prepared=shapes, config=config,
        num_heads=heads, dim=dim,
    )  # fmt: skip
    out = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(count, config.tokens), heads),
        **specs(arrays, pool, heads, count, operands=4),
        compiler_params=compat.compiler_params(config.num_warps, 1),
        interpret=interpret,
        name="jkv_write",
    )(
        sizes_of(count=count, pool=pool.shape[0]), slots[None].astype(jnp.int32), k.reshape(count, -1),
        v.reshape(count, -1), *arrays, pool,
    )  # fmt: skip
    return out[0], out[1].reshape(heads, count)
