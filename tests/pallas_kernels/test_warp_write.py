"""The register-level write kernel: the bytes of the plain reference, and its instructions against numpy."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jkv import page as pages
from jkv.calibration import bind, decision_key
from jkv.errors import JkvError
from jkv.registry import parse
from jkv.rotate import turn
from jkv.stages import affine
from jkv.stages.floats import e4m3_decode, e4m3_encode
from jkv.stages.groupquant import Affine, round_to_grid
from jkv.stages.pack import pack_words
from pallas_kernels import build, compat
from pallas_kernels import write as writes
from pallas_kernels.encoding import prepare
from pallas_kernels.warp import hadamard, ops, pairs, quantize, scatter, simt
from pallas_kernels.warp.writable import at_once, supports
from pallas_kernels.write import WriteConfig, default_config, write
from tests import cases
from tests.pallas_kernels.devices import on_gpu
from tests.pallas_kernels.writing import BLOCK_TOKENS, BLOCKS, HEADS, PER_BLOCK, Setting, rows, stored

FIXED2, FIXED4 = "flagrot-auto:bits=2,mode=fixed", "flagrot-auto:bits=4,mode=fixed"
COUNT = 21  # no multiple of a pass
RNG = np.random.default_rng(0)


@functools.cache
def calibrated(spec: str, dim: int, heads: int = HEADS):
    """As :func:`tests.cases.bound`, for specs that it does not know: the first head turns segments, the last itself."""
    scheme, known = parse(spec), cases.calibration(dim, heads)
    arrays = dict(known.arrays)
    for entry in ("choice", "center"):
        arrays.setdefault(f"{entry}/{decision_key(scheme)}", arrays[f"{entry}/{decision_key(parse(FIXED4))}"])
    found = bind(scheme, dataclasses.replace(known, arrays=arrays), 0, heads, dim)
    return scheme, jax.tree.map(jnp.asarray, found)


def setting(spec: str, dim: int) -> Setting:
    """A pool of random bytes, so that a byte too many is seen."""
    scheme, calib = calibrated(spec, dim)
    size = PER_BLOCK * pages.layout(scheme, dim).nbytes
    return Setting(
        scheme, calib, jnp.asarray(np.random.default_rng(0).integers(0, 256, (BLOCKS, HEADS, size)), jnp.uint8)
    )


def slots_of(count: int) -> np.ndarray:
    slots = np.random.default_rng(count).permutation(BLOCKS * BLOCK_TOKENS)[:count].astype(np.int32)
    slots[[3, 7]] = -2
    return slots


def odd_rows(dim: int) -> tuple[jax.Array, jax.Array]:
    """Rows with zeros, constants, values that are not finite and values of all sizes."""
    k, v = rows(COUNT, dim)
    found = []
    for x in (k, v):
        x = x.at[9].set(0).at[10].set(-0.0).at[11].set(1.5).at[12].multiply(1e30).at[13].multiply(1e-39)
        x = x.at[14].set(jnp.where(jnp.arange(dim) % 2, -0.0, 0.0)).at[15].multiply(2.0**-10).at[16, :, ::2].set(1e-9)
        x = x.at[17].set(jnp.asarray(RNG.integers(-3, 4, (HEADS, dim)) * 0.5, jnp.float32))  # codes at their edges
        found.append(x.astype(jnp.bfloat16))
    k, v = found
    k = k.at[2, 0, 3].set(jnp.nan).at[2, 1, 40].set(-jnp.inf).at[3, 0, 0].set(jnp.inf)
    return k, v.at[5, 1, 30:36].set(jnp.inf)


def check(at: Setting, k: jax.Array, v: jax.Array, slots: np.ndarray, tokens: int | None = None) -> None:
    config = WriteConfig(tokens or at_once(k.shape[-1]), kernel="warp")
    pool, bad = write(at.scheme, at.calib, k, v, at.pool, jnp.asarray(slots), config=config)
    want, counts = stored(at, k, v, slots)
    np.testing.assert_array_equal(pool, want)
    np.testing.assert_array_equal(np.asarray(bad).sum(0), counts)


@pytest.mark.parametrize(
    ("spec", "dim"),
    [
        ("rtn:bits=2", 128),
        ("rtn:bits=4,center=on", 64),
        (FIXED2, 64),
        pytest.param(FIXED2, 256, marks=on_gpu),
        (FIXED4, 128),
        pytest.param(FIXED2, 128, marks=on_gpu),
        pytest.param(FIXED4, 64, marks=on_gpu),
        pytest.param(FIXED4, 256, marks=on_gpu),
        pytest.param("rtn:bits=2,center=on", 64, marks=on_gpu),
        pytest.param("rtn:bits=2", 256, marks=on_gpu),
        pytest.param("rtn:bits=4", 256, marks=on_gpu),
        pytest.param("rtn:bits=2/rtn:bits=4", 128, marks=on_gpu),
    ],
)
def test_bytes_are_those_of_the_reference(spec: str, dim: int):
    check(setting(spec, dim), *odd_rows(dim), slots_of(COUNT))


@pytest.mark.parametrize("segments", [[False, False], [True, True]])
def test_flags_of_a_head(segments: list[bool]):
    """No segment is turned in either head, and then all are; the last head is turned whole either way."""
    at = setting(FIXED2, 64)
    choice = jnp.asarray([[*segments, False], [*segments, True]])
    at = at._replace(calib={**at.calib, "k": {**at.calib["k"], "choice": choice}})
    k, v = (x.astype(jnp.bfloat16) for x in rows(COUNT))
    check(at, k, v, slots_of(COUNT))


def test_several_passes_of_a_program():
    k, v = (x.astype(jnp.bfloat16) for x in rows(COUNT, 128))
    check(setting("rtn:bits=2", 128), k, v, slots_of(COUNT), tokens=16)


def test_schemes_and_rows_it_writes():
    for spec in ("rtn:bits=2", "rtn:bits=4,center=on", FIXED2, FIXED4, "rtn:bits=2/rtn:bits=4"):
        for dim in (64, 128, 256):
            assert supports(parse(spec), dim, jnp.bfloat16), spec
    others = (
        "bf16",
        "fp8",
        "rtn:bits=3",
        "rtn:bits=4,meta=f16",
        "rtn:bits=4,rotation=head",
        "kivi:bits=2",
        "ultraquant",
    )
    for spec in (*others, "flagrot-auto:bits=2,mode=key", "rtn:bits=4/turboquant:bits=4", "fp8/rtn:bits=4"):
        assert not supports(parse(spec), 128, jnp.bfloat16), spec
    scheme = parse("rtn:bits=2")
    assert not supports(scheme, 96, jnp.bfloat16)
    assert not supports(scheme, 128, jnp.float32)
    assert not supports(scheme, 128, jnp.bfloat16, 2**30)


@dataclasses.dataclass(frozen=True)
class Device:
    device_kind: str
    platform: str = "gpu"
    compute_capability: str = "9.0"


def test_is_chosen_where_it_runs(monkeypatch: pytest.MonkeyPatch):
    scheme, devices = parse("rtn:bits=2"), [Device("NVIDIA H200")]
    monkeypatch.setattr(writes.jax, "devices", lambda: devices)
    assert default_config(scheme, 128, jnp.bfloat16) == WriteConfig(8, kernel="warp")
    assert default_config(scheme, 128, jnp.float32).kernel == "tile"
    assert default_config(parse("ultraquant"), 128, jnp.bfloat16).kernel == "tile"
    for other in (Device("NVIDIA A100", compute_capability="8.0"), Device("gfx942"), Device("cpu", "cpu")):
        devices[0] = other
        assert default_config(scheme, 128, jnp.bfloat16).kernel == "tile"


def test_refusals(monkeypatch: pytest.MonkeyPatch):
    at, (k, v), slots = setting("rtn:bits=2", 128), rows(4, 128), jnp.arange(4, dtype=jnp.int32)
    half = k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
    with pytest.raises(JkvError, match=r"kernel='warp' does not write 'rtn:bits=2' from 1024 values of float32"):
        write(at.scheme, at.calib, k, v, at.pool, slots, config=WriteConfig(kernel="warp"))
    with pytest.raises(JkvError, match=r"tokens=4 does not fit kernel='warp' at head_dim=128; .* a multiple of 8"):
        write(at.scheme, at.calib, *half, at.pool, slots, config=WriteConfig(4, kernel="warp"))
    with pytest.raises(JkvError, match=r"num_warps=2 is not allowed; num_warps must be one of \(1,\)"):
        WriteConfig(num_warps=2, kernel="warp")
    with pytest.raises(JkvError, match="kernel=lane is not allowed"):
        WriteConfig(kernel="lane")  # type: ignore[arg-type]
    monkeypatch.setattr(writes.jax, "devices", lambda: [Device("gfx942")])
    with pytest.raises(JkvError, match="kernel='warp' does not run on gfx942"):
        write(at.scheme, at.calib, *half, at.pool, slots, config=WriteConfig(kernel="warp"))


def compiled(spec: str, dim: int) -> build.Compiled:
    scheme, calib = calibrated(spec, dim, 8)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), prepare(scheme, calib))
    pool = jax.ShapeDtypeStruct((64, 8, PER_BLOCK * pages.layout(scheme, dim).nbytes), jnp.uint8)
    row = jax.ShapeDtypeStruct((256, 8, dim), jnp.bfloat16)
    tokens = at_once(dim)
    call = functools.partial(write, scheme, config=WriteConfig(tokens, kernel="warp"), interpret=False)
    found = compat.lower(call, shapes, row, row, pool, jax.ShapeDtypeStruct((256,), jnp.int32), platform="cuda")
    assert [x.grid for x in found] == [(256 // tokens, 8, 1)]
    return build.compile(found[0], "sm_90")


@pytest.mark.skipif(not build.available(), reason="needs the triton wheel")
@pytest.mark.parametrize(("spec", "dim"), [(FIXED2, 128), (FIXED4, 256), ("rtn:bits=2", 64)])
def test_compiles_without_spills_or_shared_memory(spec: str, dim: int):
    made = compiled(spec, dim)
    assert (made.spills, made.shared_bytes) == (0, 0)
    assert made.registers <= 96
    words = 2 if "bits=2" in spec else 4
    assert len(re.findall(rf"st\.global\.v{words}\.b32", made.assembly)) == 2, "the codes of K and of V at once"


# -- parts ------------------------------------------------------------------------------------------------------------


def lanes(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x)


def paired(low: np.ndarray, high: np.ndarray) -> jax.Array:
    bits = [x.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32) for x in (low, high)]
    return jnp.asarray(bits[0] | (bits[1] << 16))


def numbers(count: int = 32) -> np.ndarray:
    """float32 on the bfloat16 grid, with zeros and ties."""
    x = RNG.standard_normal(count).astype(ml_dtypes.bfloat16).astype(np.float32)
    x[:4] = 0.0, -0.0, 1.0, 1.0
    return x


def test_instructions():
    a, b, c, d = (numbers() for _ in range(4))
    bits = RNG.integers(0, 2**32, (3, 32), dtype=np.uint32)
    for op, want in (("min", np.minimum), ("max", np.maximum)):
        got = pairs.floats(pairs.bf16x2(op, paired(a, b), paired(c, d)))
        np.testing.assert_array_equal(got, [want(a, c), want(b, d)])
    wide = (x.astype(np.float64) for x in (a, b, c, d))
    rounded = [
        x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in (lambda a, b, c, d: (a * c + d, b * d + c))(*wide)
    ]
    got = pairs.floats(pairs.bf16x2("fma", paired(a, b), paired(c, d), paired(d, c)))
    np.testing.assert_array_equal(got, rounded)
    got = pairs.bf16x2("fma", paired(np.full(32, np.inf), np.full(32, np.nan)), jnp.zeros(32, jnp.uint32), paired(a, b))
    assert np.isnan(pairs.floats(got)).all()
    mask = np.where(a >= c, 0xFFFF, 0) | np.where(b >= d, 0xFFFF0000, 0)
    np.testing.assert_array_equal(pairs.at_least(paired(a, b), paired(c, d)), mask)
    np.testing.assert_array_equal(ops.select_bits(*map(lanes, bits)), (bits[0] & ~bits[2]) | (bits[1] & bits[2]))
    np.testing.assert_array_equal(ops.append_sign(lanes(bits[0]), lanes(a)), (bits[0] << 1) | np.signbit(a))
    np.testing.assert_array_equal(simt.exchange(lanes(bits[0]), 2), bits[0][np.arange(32) ^ 2])
    np.testing.assert_array_equal(simt.exchange(lanes(a), 16), a[np.arange(32) ^ 16])
    for x in bits, bits.view(np.int32):
        np.testing.assert_array_equal(ops.max_of_three(*map(lanes, x)), x.max(axis=0))
    np.testing.assert_array_equal(simt.number(), np.arange(32))
    whole = np.round(a * 8)
    np.testing.assert_array_equal(
        ops.fma(lanes(whole), lanes(b), lanes(c)), (whole * b.astype(np.float64) + c).astype(np.float32)
    )
    less = ops.fma(lanes(whole), lanes(b), lanes(c), minus=True)
    np.testing.assert_array_equal(less, (whole * b.astype(np.float64) - c).astype(np.float32))
    share = ops.fma_to_unit(lanes(a), lanes(b), jnp.full(32, 0.5))
    np.testing.assert_allclose(share, np.clip(a * b + 0.5, 0, 1), atol=1e-6)
    np.testing.assert_array_equal(ops.fma_to_unit(lanes(a * np.nan), lanes(b), lanes(c)), 0)
    np.testing.assert_allclose(ops.reciprocal(lanes(b + 4)), 1 / (b + 4), rtol=1e-6)
    both = np.asarray(e4m3_encode(lanes(a * 100))), np.asarray(e4m3_encode(lanes(b))).astype(np.uint32)
    np.testing.assert_array_equal(pairs.pack_e4m3(lanes(a * 100), lanes(b)), both[0] | (both[1] << 8))


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("packed", [True, False])
def test_codes_are_those_of_the_grid(bits: int, packed: bool):
    """Any metadata, whatever the values: a lane tests one scale and one midpoint near the edges and far from them."""
    quantizer = affine(bits, "channels").fwd.__self__
    assert isinstance(quantizer, Affine)
    for _ in range(4):
        scale = np.array(e4m3_decode(jnp.asarray(RNG.integers(0, 0x7F, 32), jnp.uint8)))
        zero = np.array(e4m3_decode(jnp.asarray(RNG.choice([*range(0x7F), *range(0x80, 0xFF)], 32), jnp.uint8)))
        zero[:8] = scale[:8] * RNG.choice([-1, 0, 1], 8)  # an edge at zero: values far smaller count there
        edge = zero + scale * RNG.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (32, 32))
        edge = edge.astype(ml_dtypes.bfloat16).view(np.int16) + RNG.integers(-2, 3, (32, 32), dtype=np.int16)
        x = edge.astype(np.int16).view(ml_dtypes.bfloat16).astype(np.float32)
        tiny = (RNG.standard_normal((8, 8)) * 2.0 ** -RNG.integers(16, 40, (8, 8))).astype(np.float32)
        x[:8, :8] = (tiny * scale[:8, None]).astype(ml_dtypes.bfloat16).astype(np.float32)
        x[8:, 16] *= 2.0**40
        x = np.where(np.isfinite(x), x, 0)  # [lane, channel]
        if not packed:
            x = (x * (1 + RNG.integers(-1, 2, x.shape) * 2.0**-23)).astype(np.float32)
        meta = quantize.Meta(jnp.zeros(32), jnp.zeros(32), lanes(scale), lanes(zero))
        values = [lanes(x[:, i]) for i in range(32)]
        if packed:
            values = [paired(x[:, i], x[:, i + 1]) for i in range(0, 32, 2)]
        fields = quantize.encode(quantizer, values, meta)
        want = round_to_grid(lanes(x) - zero[:, None], lanes(scale)[:, None], (2**bits - 1) / 2, 2**bits - 1)
        np.testing.assert_array_equal(unpacked(fields), np.asarray(want))


def unpacked(fields: list[jax.Array]) -> np.ndarray:
    """The codes ``[lane, channel]`` of a segment's fields."""
    found = np.zeros((32, 32), np.int64)
    for i in range(16):
        if len(fields) == 2:
            field = np.asarray(fields[i // 8]) >> (16 * (i & 1) + 4 * (i % 8 // 2))
            found[:, i], found[:, i + 16] = field & 3, (field >> 2) & 3
        else:
            field = np.asarray(fields[i // 4]) >> (8 * (i % 4))
            found[:, i], found[:, i + 16] = field & 15, (field >> 4) & 15
    return found


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("bits", [2, 4])
def test_fields_become_words(bits: int, dim: int):
    segments = dim // 32
    codes = RNG.integers(0, 2**bits, (32 // segments, dim)).astype(np.int32)
    by_lane = codes.reshape(32, 32).astype(np.uint32)
    fields = [np.zeros(32, np.uint32) for _ in range(bits)]
    for i in range(16):
        field = by_lane[:, i] | (by_lane[:, i + 16] << bits)
        if bits == 2:
            fields[i // 8] |= field << (16 * (i & 1) + 4 * (i % 8 // 2))
        else:
            fields[i // 4] |= field << (8 * (i % 4))
    got = np.stack([np.asarray(x) for x in scatter.scatter([lanes(x) for x in fields], segments)], axis=-1)
    want = np.ascontiguousarray(np.asarray(pack_words(lanes(codes), bits))).view(np.uint32)
    np.testing.assert_array_equal(got.reshape(want.shape), want)


@pytest.mark.parametrize("segments", [2, 8])
def test_butterflies_are_the_rotation(segments: int):
    x = RNG.standard_normal((32 // segments, segments * 32)).astype(np.float32)
    x[0, :32] = 0
    registers = [lanes(x.reshape(32, 32)[:, i]) for i in range(32)]
    for kind, share in (("segment", 32**-0.5), ("head", (32 * segments) ** -0.5)):
        made = hadamard.turn_segment(registers, jnp.ones(32))
        if kind == "head":
            made = hadamard.turn_lanes(made, segments)
        made = hadamard.normalize(made, jnp.ones(32), jnp.float32(share))
        np.testing.assert_array_equal(np.stack(made, axis=-1).reshape(x.shape), turn(lanes(x), kind))
    # Rows on the bfloat16 grid that are not turned come out as they were.
    grid = [lanes(np.asarray(a).astype(ml_dtypes.bfloat16).astype(np.float32)) for a in registers]
    kept = hadamard.normalize(hadamard.turn_segment(grid, jnp.zeros(32)), jnp.zeros(32), jnp.float32(1))
    np.testing.assert_array_equal(np.stack(kept), np.stack(grid))
