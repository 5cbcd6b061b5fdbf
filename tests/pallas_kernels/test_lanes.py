"""Unpacking in registers: plain form against the definition, assembled forms against the plain one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from jkv.stages.floats import e2m1_decode, e4m3_decode
from jkv.stages.pack import pack_words, word_shape
from pallas_kernels import build, compat, lanes
from tests.pallas_kernels import emulate
from tests.pallas_kernels.devices import INTERPRET

ROWS = 32


def _integers(head_dim: int, bits: int, words: jax.Array, high: jax.Array | None = None) -> list[jax.Array]:
    per_word = word_shape(head_dim, 2 if bits == 3 else bits)[2]
    return [lanes.integers(words, bits, plane, high) for plane in range(per_word)]


def _look_up(words: jax.Array, tables: jax.Array) -> list[jax.Array]:
    return [
        plane
        for half in range(max(words.dtype.itemsize // 2, 1))
        for plane in lanes.look_up(words, half, [tables[i] for i in range(8)])
    ]


def _e2m1(codes: jax.Array) -> list[jax.Array]:
    return [lanes.e2m1(codes, odd) for odd in (False, True)]


@functools.cache
def _cases() -> dict[str, tuple]:
    """Name: function, operands and the planes that it must give, in float64."""
    rng = np.random.default_rng(0)
    found = {}
    for head_dim, bits in ((64, 2), (128, 2), (256, 2), (64, 4), (128, 4), (256, 4), (128, 3), (256, 3)):
        codes = rng.integers(0, 2**bits, (ROWS, head_dim))
        low = 2 if bits == 3 else bits
        chunks, lanes_of, per_word = word_shape(head_dim, low)
        operands = [pack_words(jnp.asarray(codes & (2**low - 1)), low)]
        if bits == 3:
            operands.append(pack_words(jnp.asarray(codes >> 2), 1))
        units = lanes.units(bits, per_word)
        by_plane = codes.reshape(ROWS, chunks, per_word, lanes_of)
        want = [by_plane[:, :, p].reshape(ROWS, -1) * units[p] for p in range(per_word)]
        found[f"{bits} bits, {head_dim}"] = (functools.partial(_integers, head_dim, bits), operands, want)
        if bits == 4:
            levels = np.sort(rng.standard_normal(16)).astype(np.float16)
            tables = lanes.table(jnp.asarray(levels, jnp.float32))
            looked = [levels[by_plane[:, :, p]].reshape(ROWS, -1).astype(np.float64) for p in range(per_word)]
            found[f"table, {head_dim}"] = (_look_up, [*operands, tables], looked)
    codes = rng.integers(0, 256, (ROWS, 32)).astype(np.uint8)
    nibbles = (codes & 15, codes >> 4)
    want = [np.asarray(e2m1_decode(jnp.asarray(n, jnp.int32)), np.float64) * lanes.E2M1_UNIT for n in nibbles]
    found["e2m1"] = (_e2m1, [jnp.asarray(codes)], want)
    return found


def _kernel(function, results: int, *refs) -> None:
    operands, outs = refs[:-results], refs[-results:]
    planes = function(*(ref if ref.ndim == 1 else ref[...] for ref in operands))
    for out, plane in zip(outs, planes, strict=True):
        out[...] = plane


def _call(name: str, interpret: bool):
    function, _, want = _cases()[name]
    shape = jax.ShapeDtypeStruct(want[0].shape, jnp.float16)
    return pl.pallas_call(
        functools.partial(_kernel, function, len(want)),
        out_shape=[shape] * len(want),
        compiler_params=compat.compiler_params(1, 1),
        interpret=interpret,
    )


@pytest.mark.parametrize("name", _cases())
def test_planes_are_exactly_the_codes(name: str):
    """Interpret mode runs the plain form; on a GPU this same test runs the assembled one."""
    _, operands, want = _cases()[name]
    got = jax.jit(_call(name, INTERPRET))(*operands)
    for plane, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(plane, np.float64), expected)


@pytest.mark.parametrize("form", ["ptx", "gcn"])
@pytest.mark.parametrize("name", _cases())
def test_assembly_equals_the_plain_form(name: str, form: str, monkeypatch: pytest.MonkeyPatch):
    """Instruction by instruction on the CPU, with the operands packed into registers as Triton packs them."""
    function, operands, want = _cases()[name]
    seen = []

    def emulated(args, dtypes, plain, *, ptx, gcn, pack):
        shape = args[0].shape
        registers = []
        for x in (np.asarray(a).reshape(-1, pack) for a in args):
            per = min(4 // x.dtype.itemsize, pack)  # elements of a register
            for part in x.reshape(x.shape[0], pack // per, per).swapaxes(0, 1):
                registers.append(np.ascontiguousarray(part).view(f"u{per * x.dtype.itemsize}")[:, 0])
        text = {"ptx": ptx, "gcn": gcn}[form]
        out = np.stack(emulate.run(text, [r.astype(np.uint32) for r in registers]))
        seen.append(text)
        halves = out.view(np.uint16).reshape(len(dtypes), -1, out.shape[1], 2).swapaxes(1, 2)
        return [jnp.asarray(h.reshape(shape).view(np.float16)) for h in halves]

    monkeypatch.setattr(lanes, "asm", emulated)
    for plane, expected in zip(function(*operands), want, strict=True):
        np.testing.assert_array_equal(np.asarray(plane, np.float64), expected)
    assert seen


@pytest.mark.parametrize("target", build.TARGETS)
def test_assembly_compiles(target: str, capfd: pytest.CaptureFixture[str]):
    pytest.importorskip("triton", reason="compiling needs the triton package")
    table = {"sm_90": "prmt.b32", "gfx942": "v_perm_b32", "gfx950": "v_perm_b32"}[target]
    for name in ("table, 128", "e2m1", "3 bits, 128", "2 bits, 256"):
        _, operands, _ = _cases()[name]
        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        (lowered,) = compat.lower(_call(name, False), *avals, platform=build.platform_of(target))
        assert "elementwise_inline_asm" in lowered.text
        compiled = build.compile(lowered, target)
        assert compiled.spills == 0
        if name in ("table, 128", "e2m1"):
            assert (table if name[0] == "t" else "0x0e000e00") in compiled.assembly.lower()
    # LLVM reports operands that it cannot place, and goes on without them.
    assert "error" not in capfd.readouterr().err


def test_e4m3_is_exact_for_every_byte():
    byte = jnp.arange(256, dtype=jnp.uint32)
    byte = byte[(byte & 0x7F) != 0x7F]
    want = np.asarray(e4m3_decode(byte.astype(jnp.uint8)), np.float64) * lanes.E4M3_UNIT
    np.testing.assert_array_equal(np.asarray(lanes.e4m3(byte), np.float64), want)
    np.testing.assert_array_equal(np.asarray(lanes.e4m3(byte, magnitude=True), np.float64), np.abs(want))
