"""Register-level kernels against float64 attention over what is stored, and their fragments against matrices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from jkv.registry import parse
from jkv.stages.floats import e2m1_decode, e4m3_decode
from jkv.stages.pack import pack_words
from pallas_kernels import compat, warp
from pallas_kernels.config import DecodeConfig
from pallas_kernels.options import AttentionOptions
from pallas_kernels.warp import codes, keys, pairs, queries, simt, sparse
from pallas_kernels.warp.key_codes import make_codes
from pallas_kernels.warp.value_codes import make_value_codes
from tests.pallas_kernels import paged
from tests.pallas_kernels.devices import INTERPRET, on_gpu
from tests.pallas_kernels.test_lane_decode import FIRST, LENGTHS, assert_close, run

FORMS = [("e2m1", 4, d) for d in (64, 128)] + [
    (f, b, d) for d in (64, 128, 256) for f, b in (("int", 2), ("int", 4), ("table", 4), ("e4m3", 8))
]
R, J = np.arange(32) // 4, np.arange(32) % 4
LEVELS = np.linspace(-1, 0.9, 16).astype(np.float32)
# spec, head_dim, query rows: every key side with every value side's kind, one to sixteen query heads
WHOLE = (
    ("flagrot-auto:bits=2,mode=key", 64, 3),
    ("flagrot-kivi:bits=2,mode=group", 64, 4),
    ("turboquant:bits=4", 64, 1),
    ("fp8", 64, 6),
)
LARGER = (
    ("fp8:scale=head", 128, 4),
    ("fp8", 256, 8),
    ("flagrot-auto:bits=2,mode=key", 128, 4),
    ("flagrot-auto:bits=2,mode=key", 256, 1),
    ("flagrot-auto:bits=4,mode=fixed", 64, 16),
    ("flagrot-kivi:bits=2,mode=group", 128, 8),
    ("flagrot-kivi:bits=2,mode=fixed", 256, 3),
    ("kivi:bits=4", 128, 4),
    ("rtn:bits=4", 256, 2),
    ("rtn:bits=2", 128, 5),
    ("ultraquant", 128, 4),
    ("ultraquant:rotate_v=on", 256, 4),
    ("ultra-tq:scale=block", 128, 4),
    ("ultra-tq:v=same", 128, 7),
    ("ultra-tq:scale=block,v=same", 64, 4),
    ("turboquant:bits=4", 256, 4),
)
# Sinks and unfinished pages need masks, which finished pages do without.
MASKED = (("rtn:bits=4,tail=0", 64, 4), ("fp8:tail=0", 64, 2), ("ultraquant:tail=0", 64, 5))
MASKED_LARGER = (
    ("fp8:tail=0", 128, 4),
    ("flagrot-auto:bits=2,mode=key,tail=0", 128, 4),
    ("ultra-tq:v=same,tail=0", 128, 2),
    ("rtn:bits=2,tail=0", 256, 4),
)
STORED = np.array([0, 32, 64, 96, 128, 96, 32], np.int32)


def check(spec: str, head_dim: int, rows: int, stored: np.ndarray, first: np.ndarray, splits: int = 2, **options):
    pool = paged.pool(spec, head_dim, batch=len(stored))
    copies = paged.copies(pool, rows)
    config = DecodeConfig(kernel="warp", num_splits=splits, num_warps=1)
    got = run(pool, copies, stored, first, config, AttentionOptions(**options), module=warp)
    assert_close(got, paged.attention(pool, copies, stored, first, options.get("softcap")), stored, first, mass=6e-3)


@pytest.mark.parametrize(
    ("spec", "head_dim", "rows"), [*WHOLE, *(pytest.param(*case, marks=on_gpu) for case in LARGER)]
)
def test_whole_pages(spec: str, head_dim: int, rows: int):
    assert warp.supports(parse(spec), head_dim)
    check(spec, head_dim, rows, STORED, np.zeros_like(STORED), splits=3)


@pytest.mark.parametrize(
    ("spec", "head_dim", "rows"), [*MASKED, *(pytest.param(*case, marks=on_gpu) for case in MASKED_LARGER)]
)
def test_ragged_ends(spec: str, head_dim: int, rows: int):
    check(spec, head_dim, rows, LENGTHS, FIRST)


@on_gpu
def test_softcap():
    check("rtn:bits=2,center=off", 64, 4, STORED, np.zeros_like(STORED), softcap=2.0)


def test_leaves_other_layouts_to_other_kernels():
    for spec in ("bf16", "rtn:bits=3", "kivi:bits=2,meta=f16", "flagrot-auto:bits=2/turboquant:bits=4"):
        assert not warp.supports(parse(spec), 128), spec
    assert not warp.supports(parse("rtn:bits=4"), 96)


def coded(form: str, bits: int, head_dim: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Random rows of codes as bytes ``[tokens, bytes]``, and the values they stand for."""
    code = np.random.default_rng(head_dim).integers(0, 2**bits, (tokens, head_dim)).astype(np.int32)
    if form == "e4m3":
        code = np.where(code & 127 == 127, 0, code).astype(np.uint8)  # NaN is never stored
        return code, np.asarray(e4m3_decode(jnp.asarray(code)))
    if form == "e2m1":
        pairs = code.reshape(tokens, -1, 2)
        return (pairs[..., 0] | (pairs[..., 1] << 4)).astype(np.uint8), np.asarray(e2m1_decode(jnp.asarray(code)))
    raw = np.ascontiguousarray(np.asarray(pack_words(jnp.asarray(code), bits))).view(np.uint8).reshape(tokens, -1)
    return raw, LEVELS.astype(np.float16)[code].astype(np.float32) if form == "table" else code.astype(np.float32)


def word(raw: np.ndarray, token: np.ndarray, offset: np.ndarray, width: int = 4) -> jax.Array:
    return jnp.asarray(sum(raw[token, offset + b].astype(np.uint32) << (8 * b) for b in range(width)).astype(np.uint32))


def table_of(form: str):
    return codes.table_registers([simt.full(float(x)) for x in LEVELS]) if form == "table" else None


@pytest.mark.parametrize(("form", "bits", "head_dim"), FORMS)
def test_key_registers_hold_the_channels_that_the_map_says(form: str, bits: int, head_dim: int):
    side = make_codes(head_dim, bits, form)
    whole = {
        "e2m1": keys.PowerKeys,
        "table": lambda c: keys.TableKeys(c, True),
        "int": lambda c: keys.TokenKeys(c, False),
        "e4m3": keys.FloatKeys,
    }
    raw, value = coded(form, bits, head_dim, 16)
    registers = [
        word(raw, 2 * R, first + J * per_j + 4 * i) for per_j, first, count in side.words.loads for i in range(count)
    ]
    unpacked = side.unpack(registers, table_of(form))
    exponent, shifts = queries.exponent_of(whole[form](side)), queries.shifts_of(whole[form](side))
    for s, step in enumerate(side.words.steps):
        for i, (register, position) in enumerate((step.low, step.high)):
            for half, got in enumerate(pairs.halves(unpacked[register][position])):
                channel = side.words.channels[s, J, i, half]
                assert form == "e4m3" or (channel // 32 == step.segment).all()
                want = value[2 * R, channel] * 2.0 ** (exponent + int(shifts[s, i]))
                np.testing.assert_array_equal(np.asarray(got), want.astype(np.float32))
    assert sorted(side.words.channels.ravel()) == list(range(head_dim))


@pytest.mark.parametrize(("form", "bits", "head_dim"), FORMS)
def test_value_registers_hold_the_channels_that_the_map_says(form: str, bits: int, head_dim: int):
    side = make_value_codes(head_dim, bits, form)
    raw, value = coded(form, bits, head_dim, 16)
    tokens = [
        [
            word(raw, 4 * J + t, first + R * per_r + width * i, width)
            for per_r, first, count, width in side.words.loads
            for i in range(count)
        ]
        for t in range(4)
    ]
    unpacked = side.unpack(tokens, table_of(form))
    seen = []
    for tile in side.words.tiles:
        for row, source in enumerate((tile.low, tile.high)):
            channel = tile.channels[R, row]
            seen += list(tile.channels[:, row])
            if form != "e4m3":
                assert (tile.channels[:4, row] // 32 == tile.segments[0]).all()
                assert (tile.channels[4:, row] // 32 == tile.segments[1]).all()
            for column, registers in enumerate(unpacked):
                bits_of = registers[source[0]][source[1]]
                for half in range(2):
                    narrow = jnp.asarray((bits_of >> (16 * half)) & 0xFFFF, jnp.uint16)
                    kind = jnp.bfloat16 if side.kind == "bf16" else jnp.float16
                    got = np.asarray(jax.lax.bitcast_convert_type(narrow, kind)).astype(np.float64)
                    want = value[4 * J + column + 2 * half, channel] * 2.0 ** side.exponent(source)
                    np.testing.assert_array_equal(got, want)
    assert sorted(seen) == list(range(head_dim))


def test_fragments_are_those_of_the_instruction():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((16, 16), (16, 8)))
    c = rng.standard_normal((16, 8)).astype(np.float32)

    def pair(x, y):
        return pairs.joined(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32))

    rows = [(R + 8 * (i % 2), 2 * J + 8 * (i // 2)) for i in range(4)]
    fragment_a = [pair(a[row, column], a[row, column + 1]) for row, column in rows]
    fragment_b = [pair(b[2 * J + 8 * i, R], b[2 * J + 8 * i + 1, R]) for i in range(2)]
    places = [(R + 8 * (i // 2), 2 * J + i % 2) for i in range(4)]
    got = simt.mma(fragment_a, fragment_b, [jnp.asarray(c[place]) for place in places])
    want = a.astype(np.float64) @ b.astype(np.float64) + c
    for register, place in zip(got, places, strict=True):
        np.testing.assert_allclose(register, want[place], atol=1e-4)
    tile = rng.standard_normal((8, 8)).astype(np.float16)
    turned = pairs.halves(simt.transpose(pair(tile[R, 2 * J], tile[R, 2 * J + 1])))
    np.testing.assert_array_equal(turned[0], tile[2 * J, R].astype(np.float32))
    np.testing.assert_array_equal(turned[1], tile[2 * J + 1, R].astype(np.float32))


def in_a_kernel(function, *operands):
    """``function`` of tiles of one warp, in a kernel where there is a GPU: four float32 results."""

    def kernel(*refs):
        for out, result in zip(refs[-4:], function(*(ref[...] for ref in refs[:-4])), strict=True):
            out[...] = result

    shape = jax.ShapeDtypeStruct((simt.LANES,), jnp.float32)
    call = pl.pallas_call(
        kernel, out_shape=[shape] * 4, compiler_params=compat.compiler_params(1, 1), interpret=INTERPRET
    )
    return call(*operands)


def picked(a, b, flags):
    """``sum over k of a[i, k] * b[k, flags[i, k]]`` with ``b[16, 2, 8]``."""
    return np.einsum("ik,ikn->in", a.astype(np.float64), b.astype(np.float64)[np.arange(16), flags.astype(int)])


@pytest.mark.parametrize("segments", [2, 4, 8])
def test_values_pick_rows_of_the_other_operand(segments: int):
    rng = np.random.default_rng(segments)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((16, 16), (16, 2, 8)))
    flags = rng.integers(0, 2, (16, segments)).astype(bool)
    row = np.where(flags, 0x80, 0).astype(np.uint32) + 0x25
    words = [sum(row[:, 4 * w + i] << (8 * i) for i in range(min(segments, 4))) for w in range(max(1, segments // 4))]

    def pair(x, y):
        return pairs.joined(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32))

    def result(make_picks):
        def product(*registers):
            low, high, c = list(registers[8 : 8 + count]), list(registers[8 + count : -1]), [registers[-1]] * 4
            return sparse.mma_picking(list(registers[:4]), list(registers[4:8]), make_picks(low, high), c)

        places = [(R + 8 * (i % 2), 2 * J + 8 * (i // 2)) for i in range(4)]
        left = [pair(a[place], a[place[0], place[1] + 1]) for place in places]
        rows = [8 * (i // 2) + 4 * (i % 2) + J for i in range(4)]
        right = [pair(b[row, 0, R], b[row, 1, R]) for row in rows]
        got = in_a_kernel(product, *left, *right, *low, *high, simt.full(0.5))
        out = np.zeros((16, 8))
        for i, register in enumerate(got):
            out[R + 8 * (i // 2), 2 * J + i % 2] = register
        return out - 0.5

    low, high = ([jnp.asarray(word[first + R].astype(np.uint32)) for word in words] for first in (0, 8))
    count = len(words)
    for segment in range(segments):
        word, byte = divmod(segment, 4)
        got = result(lambda low, high, word=word, byte=byte: sparse.by_row(low[word], high[word], byte))
        np.testing.assert_allclose(got, picked(a, b, np.repeat(flags[:, segment, None], 16, 1)), atol=1e-4)
    got = result(lambda low, high: sparse.by_column(low, high, segments))
    np.testing.assert_allclose(got, picked(a, b, np.tile(flags, 16 // segments)), atol=1e-4)
