"""The only module that touches private APIs of JAX: typed access to byte pools, inline assembly, Triton IR as text.

Pallas gives a kernel one dtype per operand; a page of a KV cache holds many. :func:`load` and :func:`store` address an
operand as *rows of bytes* and read any dtype at any offset of a row. Rows count in 64 bits, so a pool may be larger
than 2 GiB without x64 mode. :func:`asm` is Triton's elementwise inline assembly with several results and a plain
``jax.numpy`` form, which is what runs in interpret mode and wherever a platform has no assembly of its own.

Everything here was checked with jax 0.10.2, 0.11.2 and 0.12.0.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core as jax_core
from jax._src import effects
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir, passmanager
from jax._src.lib.mlir.dialects import arith
from jax._src.lib.triton import dialect as tt
from jax._src.pallas import core as pallas_core
from jax._src.pallas.triton import lowering as triton_lowering
from jax._src.state import discharge as state_discharge
from jax._src.state import types as state_types
from jax.experimental.pallas import triton as plgpu

from jkv.stages.floats import e2m1_decode, ue8m0_decode
from pallas_kernels.lowered import Lowered as Lowered

Array = jax.Array

# -- launch parameters ------------------------------------------------------------------------------------------------


def compiler_params(num_warps: int, num_stages: int) -> Any:
    """Parameters that select the Triton lowering in every supported version of JAX."""
    return plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages)


_program_id_p = jax_core.Primitive("jkv_program_id")


def program_id(axis: int) -> Array:
    """Where a program is along one axis of its grid, the number that the device has.

    Pallas divides and multiplies its axes by their sizes, so the text of a kernel would depend on them. Of the second
    and third axis (a device has three) no more than 65535 may be asked for.
    """
    return _program_id_p.bind(axis=axis)


@_program_id_p.def_abstract_eval
def _program_id_abstract(*, axis: int) -> Any:
    return jax_core.ShapedArray((), np.dtype("int32"))


@_program_id_p.def_bind_with_trace
def _program_id_bind(trace: Any, *rest: Any) -> Any:
    grid = pallas_core.current_grid_env()  # of interpret mode
    if grid:
        return grid[rest[-1]["axis"]].index
    return jax_core.Primitive.bind_with_trace(_program_id_p, trace, *rest)


@triton_lowering.register_lowering(_program_id_p)
def _program_id_lowering(ctx: Any, *, axis: int):
    return tt.get_program_id(axis)


def dot(a: Array, b: Array, *, trans_b: bool = False, precision: str | None = None) -> Array:
    """``a @ b`` (or ``a @ b.T``) of two tiles, float32 result."""
    return plgpu.dot(a, b, trans_b=trans_b, precision=precision)


class _LaunchEffect(effects.Effect):
    """Keeps an equation without results in the kernel."""


_launch_effect = _LaunchEffect()
pallas_core.kernel_local_effects.add_type(_LaunchEffect)
effects.control_flow_allowed_effects.add_type(_LaunchEffect)
_limit_registers_p = jax_core.Primitive("jkv_limit_registers")
_limit_registers_p.multiple_results = True


def limit_registers(count: int) -> None:
    """Let the assembler use ``count`` registers a thread at most (NVIDIA), so that more warps fit.

    Left alone it takes as many as shorten the code, and a kernel that waits for memory wants warps instead.
    """
    _limit_registers_p.bind(count=count)


@_limit_registers_p.def_effectful_abstract_eval
def _limit_registers_abstract(*, count: int) -> Any:
    return [], {_launch_effect}


@triton_lowering.register_lowering(_limit_registers_p)
def _limit_registers_lowering(ctx: Any, *, count: int):
    op = ir.InsertionPoint.current.block.owner
    while op.name != "builtin.module":
        op = op.parent
    op.attributes["ttg.maxnreg"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), count)
    return []


mlir.register_lowering(_limit_registers_p, lambda ctx, *, count: [])


# -- rows of bytes ----------------------------------------------------------------------------------------------------

_load_p = jax_core.Primitive("jkv_load")
_store_p = jax_core.Primitive("jkv_store")
_store_p.multiple_results = True


def load(
    ref: Any,
    row: Any,
    offset: Any,
    index: Array,
    dtype: Any,
    *,
    mask: Array | None = None,
    other: float = 0,
    evict: str | None = None,
) -> Array:
    """Elements ``index`` (a tile of int32) of the ``dtype`` array that starts ``offset`` bytes into row ``row``.

    ``ref`` is a whole operand (``pl.BlockSpec(memory_space=pl.ANY)``) of any shape; a row is its last axis. ``offset``
    must be a multiple of the item size; an index may lead beyond the row, into those that follow. Elements where
    ``mask`` is false are ``other`` and are not read. ``evict`` is Triton's eviction policy, ``"evict_first"`` for data
    that is read once. ``row`` may be a tile that broadcasts to ``index``, of the same rank: then every element has a
    row of its own.
    """
    args = [ref, jnp.int32(row), jnp.int32(offset), index]
    if mask is not None:
        args.append(jnp.broadcast_to(mask, index.shape))
    return _load_p.bind(*args, dtype=np.dtype(dtype), other=other, evict=evict)


def store(ref: Any, row: Any, offset: Any, index: Array, value: Array, *, mask: Array | None = None) -> None:
    """Write ``value`` where :func:`load` with the same arguments and ``value.dtype`` would read; skip masked ones."""
    args = [ref, jnp.int32(row), jnp.int32(offset), index, value]
    if mask is not None:
        args.append(jnp.broadcast_to(mask, index.shape))
    _store_p.bind(*args)


def _row_bytes(aval: Any) -> int:
    return aval.shape[-1] * aval.dtype.itemsize


@_load_p.def_effectful_abstract_eval
def _load_abstract(ref: Any, row: Any, offset: Any, index: Any, *mask: Any, dtype: np.dtype, **_: Any) -> Any:
    if _row_bytes(ref) % dtype.itemsize:
        raise ValueError(f"rows of {_row_bytes(ref)} bytes hold no whole number of {dtype.name} elements")
    return jax_core.ShapedArray(index.shape, dtype), {state_types.ReadEffect(0)}


@_store_p.def_effectful_abstract_eval
def _store_abstract(ref: Any, row: Any, offset: Any, index: Any, value: Any, *mask: Any) -> Any:
    if index.shape != value.shape:
        raise ValueError(f"index of shape {index.shape} does not address a value of shape {value.shape}")
    return [], {state_types.WriteEffect(0)}


def _values(ctx: Any, operands: Sequence[Any], first: int) -> list[Any]:
    """Operands ``first``, ``first + 1``, ... as IR values; literals among them become constants."""
    avals = ctx.avals_in[first : first + len(operands)]
    return [triton_lowering._ensure_ir_value(x, aval) for x, aval in zip(operands, avals, strict=True)]


def _pointers(ctx: Any, ref: Any, row: Any, offset: Any, index: Any, dtype: np.dtype) -> Any:
    """Tile of typed pointers: base + row * row bytes + offset, then element ``index``."""
    i64 = ir.IntegerType.get_signless(64)
    row, offset, index = _values(ctx, (row, offset, index), 1)
    rows = ctx.avals_in[1].shape

    def tile(element: ir.Type, shape: Sequence[int]) -> ir.Type:
        return ir.RankedTensorType.get(shape, element) if shape else element

    def spread(x: Any) -> Any:
        return tt.splat(tile(x.type, rows), x) if rows else x

    start = arith.muli(arith.extsi(tile(i64, rows), row), spread(arith.constant(i64, _row_bytes(ctx.avals_in[0]))))
    start = arith.addi(start, spread(arith.extsi(i64, offset)))
    base_type = tt.PointerType(ref.type)
    byte = tt.PointerType.get(ir.IntegerType.get_signless(8), base_type.address_space)
    typed = tt.PointerType.get(_signless(dtype), base_type.address_space)
    base = spread(ref if ref.type == byte else tt.bitcast(byte, ref))
    base = tt.addptr(base.type, base, start)
    base = base if typed == byte else tt.bitcast(tile(typed, rows), base)
    shape = ctx.avals_in[3].shape
    return tt.addptr(tile(typed, shape), triton_lowering._bcast_to(base, shape), index)


def _signless(dtype: np.dtype) -> ir.Type:
    if jnp.issubdtype(dtype, jnp.integer):
        return ir.IntegerType.get_signless(dtype.itemsize * 8)
    return mlir.dtype_to_ir_type(dtype)


@triton_lowering.register_lowering(_load_p)
def _load_lowering(ctx: Any, ref: Any, row: Any, offset: Any, index: Any, *mask: Any, dtype, other, evict):
    ptr = _pointers(ctx, ref, row, offset, index, dtype)
    filler = None
    if mask:
        mask = (triton_lowering._ensure_ir_value(mask[0], ctx.avals_in[4]),)
        shape = ctx.avals_in[3].shape
        element = _signless(dtype)
        filler = triton_lowering._full(ir.RankedTensorType.get(shape, element) if shape else element, other)
    return triton_lowering._load(ptr, mask=mask[0] if mask else None, other=filler, eviction_policy=evict)


@triton_lowering.register_lowering(_store_p)
def _store_lowering(ctx: Any, ref: Any, row: Any, offset: Any, index: Any, value: Any, *mask: Any):
    ptr = _pointers(ctx, ref, row, offset, index, ctx.avals_in[4].dtype)
    value = triton_lowering._ensure_ir_value(value, ctx.avals_in[4])
    if mask:
        mask = (triton_lowering._ensure_ir_value(mask[0], ctx.avals_in[5]),)
    triton_lowering._store(ptr, value, mask=mask[0] if mask else None)
    return []


def _as_elements(ref: Array, dtype: np.dtype) -> Array:
    """A whole operand as rows ``[R, row bytes / itemsize]`` of another dtype."""
    flat = ref.reshape(-1, ref.shape[-1])
    raw = flat if flat.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(flat, jnp.uint8)
    raw = raw.reshape(flat.shape[0], -1)
    if dtype == jnp.uint8:
        return raw
    parts = raw.reshape(raw.shape[0], -1, dtype.itemsize)
    return jax.lax.bitcast_convert_type(parts if dtype.itemsize > 1 else parts[..., 0], dtype)


def _from_elements(rows: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    raw = rows if rows.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(rows, jnp.uint8)
    size = np.dtype(dtype).itemsize
    raw = raw.reshape(*shape, size) if size > 1 else raw.reshape(shape)
    return raw if dtype == jnp.uint8 else jax.lax.bitcast_convert_type(raw, dtype)


def _discharge(primitive: Any) -> Callable[[Any], Any]:
    """Register what interpret mode does with a reference: ``rule(*values) -> (new reference or None, result)``."""

    def register(rule: Any) -> Any:
        def discharge(*args: Any, **params: Any) -> Any:
            # A context comes first from 0.11 on, input and output types before that.
            values = args[2:] if jax.__version_info__ < (0, 11) else args[1:]
            new, result = rule(*values, **params)
            return (new, *(None,) * (len(values) - 1)), result

        state_discharge.register_discharge_rule(primitive)(discharge)
        return rule

    return register


def _place(rows: Array, row: Array, offset: Array, index: Array, dtype: Any) -> Array:
    return row * rows.shape[1] + (offset // np.dtype(dtype).itemsize + index)


@_discharge(_load_p)
def _load_discharge(ref, row, offset, index, *mask, dtype, other, evict):
    # A GPU reads only what the mask allows; here reading anything is harmless, and an index outside gives `other`.
    rows = _as_elements(ref, dtype)
    value = rows.reshape(-1).at[_place(rows, row, offset, index, dtype)].get(mode="fill", fill_value=0)
    if mask:
        value = jnp.where(mask[0], value, jnp.asarray(other, dtype))
    return None, value


@_discharge(_store_p)
def _store_discharge(ref, row, offset, index, value, *mask):
    rows = _as_elements(ref, value.dtype)
    at = _place(rows, row, offset, index, value.dtype)
    if mask:
        at = jnp.where(mask[0], at, rows.size)
    flat = rows.reshape(-1).at[at].set(value, mode="drop")
    return _from_elements(flat.reshape(rows.shape), ref.shape, ref.dtype), []


_load_words_p = jax_core.Primitive("jkv_load_words")
_load_words_p.multiple_results = True


def load_words(ref: Any, row: Any, lane_offset: Array, at: int = 0, *, count: int = 1, width: int = 4) -> list[Array]:
    """Per element of ``lane_offset``: ``count`` (1, 2 or 4) consecutive little-endian words as uint32 registers.

    The address is ``row`` (as in :func:`load`) + ``lane_offset`` + ``at`` bytes, a multiple of ``count * width``; a
    word has ``width`` bytes (2 or 4). One vector instruction on NVIDIA, where read-only data may bypass the first
    cache; the kernel must not write what it reads this way.
    """
    return _load_words_p.bind(ref, jnp.int32(row), lane_offset, at=at, count=count, width=width)


@_load_words_p.def_effectful_abstract_eval
def _load_words_abstract(ref: Any, row: Any, lane_offset: Any, *, at: int, count: int, width: int) -> Any:
    word = jax_core.ShapedArray(lane_offset.shape, np.dtype("uint32"))
    return [word] * count, {state_types.ReadEffect(0)}


@triton_lowering.register_lowering(_load_words_p)
def _load_words_lowering(ctx: Any, ref: Any, row: Any, lane_offset: Any, *, at: int, count: int, width: int):
    i32 = ir.IntegerType.get_signless(32)
    row, lane_offset = _values(ctx, (row, lane_offset), 1)
    shape = ctx.avals_in[2].shape
    if ctx.context.platform != "cuda":
        return _load_words_portable(ctx, ref, row, lane_offset, at, count, width)
    address = _addresses(ctx, ref, row, lane_offset)
    into = ", ".join(f"${i}" for i in range(count))
    vector = {1: "", 2: ".v2", 4: ".v4"}[count]
    text = f"ld.global.nc{vector}.u{8 * width} {{{into}}}, [${count}+{at}];"
    if count == 1:
        text = f"ld.global.nc.u{8 * width} $0, [$1+{at}];"
    op = tt.ElementwiseInlineAsmOp(
        [ir.RankedTensorType.get(shape, i32)] * count,
        text,
        constraints=",".join(["=r"] * count + ["l"]),
        pure=True,
        packed_element=1,
        args=[address],
    )
    return list(op.results)


def _addresses(ctx: Any, ref: Any, row: Any, lane_offset: Any) -> Any:
    """Tile of 64-bit addresses: base + row * row bytes + offset of each lane."""
    i64 = ir.IntegerType.get_signless(64)
    stride = arith.constant(i64, _row_bytes(ctx.avals_in[0]))
    base = arith.addi(tt.ptr_to_int(i64, ref), arith.muli(arith.extsi(i64, row), stride))
    tile = ir.RankedTensorType.get(ctx.avals_in[2].shape, i64)
    return arith.addi(tt.splat(tile, base), arith.extsi(tile, lane_offset))


def _load_words_portable(ctx: Any, ref: Any, row: Any, lane_offset: Any, at: int, count: int, width: int) -> list[Any]:
    i32 = ir.IntegerType.get_signless(32)
    word = np.dtype(f"int{8 * width}")
    zero = arith.constant(i32, 0)
    byte = ctx.replace(avals_in=[ctx.avals_in[0], ctx.avals_in[1], ctx.avals_in[1], ctx.avals_in[2]])
    # `_pointers` counts elements; start from bytes and reinterpret.
    tile = _pointers(byte, ref, row, zero, lane_offset, np.dtype("int8"))
    space = tt.PointerType(ref.type).address_space
    typed = ir.RankedTensorType.get(ctx.avals_in[2].shape, tt.PointerType.get(_signless(word), space))
    found = []
    for i in range(count):
        step = triton_lowering._full(lane_offset.type, at + i * width)
        value = tt.load(tt.bitcast(typed, tt.addptr(tile.type, tile, step)))
        wide = ir.RankedTensorType.get(ctx.avals_in[2].shape, i32)
        found.append(value if width == 4 else arith.extui(wide, value))
    return found


@_discharge(_load_words_p)
def _load_words_discharge(ref, row, lane_offset, *, at, count, width):
    rows = _as_elements(ref, np.dtype(f"uint{8 * width}"))
    first = row * rows.shape[1] + (lane_offset + at) // width
    flat = rows.reshape(-1)
    return None, [flat.at[first + i].get(mode="fill", fill_value=0).astype(jnp.uint32) for i in range(count)]


# -- inline assembly --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Text:
    """Assembly of one platform: the text (``$0``, ``$1``, ... results first) and LLVM's operand constraints."""

    body: str
    constraints: str


_asm_p = jax_core.Primitive("jkv_asm")
_asm_p.multiple_results = True


def asm(
    args: Sequence[Array],
    dtypes: Sequence[Any],
    plain: Callable[..., Sequence[Array]],
    *,
    ptx: Text | None = None,
    gcn: Text | None = None,
    pack: int = 1,
) -> list[Array]:
    """Elementwise function of tiles of one shape, one result per dtype.

    ``plain`` is the same function in ``jax.numpy``: it runs in interpret mode, on the CPU, and in a kernel for a
    platform without a text. ``pack`` elements go into one 32-bit register where their dtype is narrower.
    """
    out = tuple(np.dtype(d) for d in dtypes)
    return _asm_p.bind(*args, dtypes=out, plain=plain, ptx=ptx, gcn=gcn, pack=pack)


@_asm_p.def_abstract_eval
def _asm_abstract(*avals: Any, dtypes: Any, **_: Any) -> Any:
    if any(a.shape != avals[0].shape for a in avals):
        raise ValueError(f"operands of inline assembly must have one shape, not {[a.shape for a in avals]}")
    return [jax_core.ShapedArray(avals[0].shape, d) for d in dtypes]


def _asm_plain(*args: Array, dtypes: Any, plain: Any, **_: Any) -> list[Array]:
    return list(plain(*args))


_asm_p.def_impl(_asm_plain)
mlir.register_lowering(_asm_p, mlir.lower_fun(_asm_plain, multiple_results=True))


@triton_lowering.register_lowering(_asm_p)
def _asm_lowering(ctx: Any, *args: Any, dtypes: Any, plain: Any, ptx: Any, gcn: Any, pack: int):
    text = ptx if ctx.context.platform == "cuda" else gcn
    if text is None:
        rule = triton_lowering.lower_fun(_asm_plain, multiple_results=True)
        return rule(ctx, *args, dtypes=dtypes, plain=plain)
    operands = _values(ctx, args, 0)
    types = [
        ir.RankedTensorType.get(a.shape, _signless(a.dtype)) if a.shape else _signless(a.dtype) for a in ctx.avals_out
    ]
    op = tt.ElementwiseInlineAsmOp(
        types, text.body, constraints=text.constraints, pure=True, packed_element=pack, args=operands
    )
    return list(op.results)


# -- products of scaled narrow floats ---------------------------------------------------------------------------------

_dot_scaled_p = jax_core.Primitive("jkv_dot_scaled")


def dot_scaled(a: Array, b: Array, b_scale: Array) -> Array:
    """``a @ (b * b_scale).T`` with MXFP4 ``b``: float32 ``[M, N]``, exact products.

    ``a: float8_e4m3fn[M, K]``, ``b: uint8[N, K / 2]`` E2M1 pairs (the even element in the low nibble), ``b_scale:
    uint8[N, K / 32]`` UE8M0 bytes. CDNA4 has an instruction for it; elsewhere Triton multiplies in BF16, which holds
    both operands exactly. (A scale of ``a`` would be one more operand, but Triton has no such product for CDNA3.)
    """
    (_, depth), columns = a.shape, b.shape[0]
    if b.shape[1] * 2 != depth or b_scale.shape != (columns, depth // 32):
        raise ValueError(f"operands {a.shape}, {b.shape}, {b_scale.shape} do not fit: [M, K], [N, K / 2], [N, K / 32]")
    return _dot_scaled_p.bind(a, b.T, b_scale)


@_dot_scaled_p.def_abstract_eval
def _dot_scaled_abstract(a: Any, b: Any, b_scale: Any) -> Any:
    return jax_core.ShapedArray((a.shape[0], b.shape[1]), np.dtype("float32"))


def _dot_scaled_plain(a: Array, b: Array, b_scale: Array) -> Array:
    pairs = b.T.astype(jnp.int32)
    values = e2m1_decode(jnp.stack([pairs & 15, pairs >> 4], axis=-1))
    values = values.reshape(*b_scale.shape, 32) * ue8m0_decode(b_scale)[..., None]
    values = values.reshape(pairs.shape[0], a.shape[1])
    return jnp.matmul(a.astype(jnp.float32), values.T, precision=jax.lax.Precision.HIGHEST)


_dot_scaled_p.def_impl(_dot_scaled_plain)
mlir.register_lowering(_dot_scaled_p, mlir.lower_fun(_dot_scaled_plain, multiple_results=False))


@triton_lowering.register_lowering(_dot_scaled_p)
def _dot_scaled_lowering(ctx: Any, a: Any, b: Any, b_scale: Any):
    result = ir.RankedTensorType.get(ctx.avals_out[0].shape, ir.F32Type.get())
    return tt.dot_scaled(
        result,
        a,
        b,
        triton_lowering._full(result, 0.0),
        tt.ScaleDotElemType.E4M3,
        tt.ScaleDotElemType.E2M1,
        False,
        b_scale=b_scale,
        lhs_k_pack=True,
        rhs_k_pack=True,
    )


# -- lowering without a device ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _pretend_device(platform: str) -> Iterator[None]:
    """From 0.11 on, JAX asks for the device kind even where none is present."""
    if jax.__version_info__ < (0, 11):
        yield
        return
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    kind = {"cuda": "NVIDIA H200", "rocm": "gfx950"}[platform]
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(kind, None, platform))):
        yield


def lower(function: Callable[..., Any], *avals: Any, platform: str) -> list[Lowered]:
    """Every Triton kernel inside ``jax.jit(function)``, lowered for ``"cuda"`` or ``"rocm"`` on any host.

    The text is portable between the Triton releases that JAX and the ``triton`` wheel bundle; bytecode is not. It is
    canonical: Pallas multiplies sizes of whole operands by zero, and nothing of that is left.
    """
    with _pretend_device(platform):
        lowered = jax.jit(function).trace(*avals).lower(lowering_platforms=(platform,))
    found: list[Lowered] = []

    def walk(op: Any) -> None:
        for region in op.regions:
            for block in region.blocks:
                for inner in block.operations:
                    name = inner.operation.name
                    if name == "stablehlo.custom_call" and "triton" in str(
                        inner.operation.attributes["call_target_name"]
                    ):
                        found.append(_text_of(inner.operation.attributes["mhlo.backend_config"]))
                    walk(inner.operation)

    walk(lowered.compiler_ir("stablehlo").operation)
    return found


def _text_of(config: Any) -> Lowered:
    entries = {entry.name: entry.attr for entry in config}
    raw = entries["ir"]
    code = raw.value_bytes if hasattr(raw, "value_bytes") else raw.value
    context = mlir.make_ir_context()
    with context:
        tt.register_dialect(context)
        module = ir.Module.parse(code)
        _make_canonical(module)
        text = module.operation.get_asm(enable_debug_info=False)
    number = {key: int(entries[key].value) for key in ("grid_x", "grid_y", "grid_z", "num_warps", "num_stages")}
    grid = (number["grid_x"], number["grid_y"], number["grid_z"])
    return Lowered(entries["name"].value, text, grid, number["num_warps"], number["num_stages"])


def _make_canonical(module: Any) -> None:
    """Fold what is constant, drop what is unused, and bring constants, which are all at the front, into one order."""
    passmanager.PassManager.parse("builtin.module(canonicalize,cse,canonicalize)").run(module.operation)
    (function,) = module.body.operations
    operations = list(function.operation.regions[0].blocks[0].operations)
    constants = [op for op in operations if op.operation.name == "arith.constant"]
    for op in sorted(constants, key=lambda op: str(op.operation.attributes["value"])):
        op.operation.move_before(next(op for op in operations if op.operation.name != "arith.constant"))
