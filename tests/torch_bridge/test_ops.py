"""The ops: the same results from every implementation, traced by torch.compile, and nothing done for bad operands."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch

from jkv.errors import JkvError
from jkv.options import AttentionOptions
from tests import caching
from tests.pallas_kernels.exact import error
from tests.torch_bridge.bridge import HEADS, side
from tests.torch_bridge.caches import empty, random
from tests.torch_bridge.paged import LENGTHS, filled
from torch_bridge import backends, op_definitions, ops, reference
from torch_bridge.operands import Once, description_of, pack, text_of, unpack

BATCH = len(LENGTHS)
TOKEN, PAGE = "flagrot-auto:bits=2,mode=key", "kivi:bits=2/fp8:scale=head"
CENTRED = "rtn:bits=4,rotation=head,center=on"
META = torch.device("meta")


def pool_of(spec: str) -> torch.Tensor:
    return torch.zeros(4, HEADS, 2 * side(spec).description.page.nbytes, dtype=torch.uint8)


def new(count: int, tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    _, k, v = random(count, tokens or 1)
    return (k, v) if tokens else (k[:, 0], v[:, 0])


def attention_of(rows: Any) -> dict[str, Any]:
    held = {"sealed": rows.sealed, "tail": rows.exact.tail, "sinks": rows.exact.sinks}
    return {"pool": rows.pool, "block_table": rows.block_table, "lengths": rows.lengths} | held


@pytest.mark.parametrize("spec", caching.FAMILIES)
def test_attention_is_that_of_the_reference(spec):
    rows = filled(spec)
    both, held = (rows.at.description, rows.at.tensors), attention_of(rows)
    q = rows.q[:, :3]
    got, want = (module.decode_attention(*both, q[:, :1], **held) for module in (ops, reference))
    assert torch.equal(got, want)
    fresh, places = (rows.k[:, :3], rows.v[:, :3]), {"counts": torch.tensor([3, 2, 1, 0, 3, 2, 1])}
    places["start"] = 3 - places["counts"]
    given = held | places | {"options": AttentionOptions(window=50)}
    got, want = (module.extend_attention(*both, q, fresh, **given) for module in (ops, reference))
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "spec, chunk",
    [
        ("flagrot-kivi:bits=2,mode=fixed,sink=5,recent=20", False),
        (CENTRED + ",tail=0,sink=3", True),
    ],
)
def test_attention_through_jax(spec, chunk):
    """The kernels, interpreted, on torch's memory; their products are of BF16."""
    rows = filled(spec)
    both, held, q = (rows.at.description, rows.at.tensors), attention_of(rows), rows.q[:, :2]
    if chunk:
        held |= {"fresh": (rows.k[:, :2], rows.v[:, :2]), "counts": torch.tensor([2, 1, 2, 0, 2, 1, 2])}
    op, q = (ops.extend_attention, q) if chunk else (ops.decode_attention, q[:, :1])
    got, want = (op(*both, q, **held, implementation=name) for name in ("jax", "reference"))
    assert error(got, want) < 4e-3


def test_writing_through_jax():
    """The same bytes, and tokens that are skipped or not finite treated alike."""
    (k, v), slots = new(5), torch.tensor([130, -1, 0, 70, -5])
    k[3, 1, 2] = torch.inf
    pages, rings = new(2, 32), new(2, 64)
    rings = [x.transpose(1, 2).to(torch.bfloat16).contiguous() for x in rings]
    found = {}
    for name in ("jax", "reference"):
        at, pool = side(CENTRED), pool_of(CENTRED)
        bad = ops.write_kv(at.description, at.tensors, k, v, pool, slots, implementation=name)
        at, paged = side(PAGE), pool_of(PAGE)
        both = at.description, at.tensors
        bad_pages = ops.write_pages(*both, *pages, paged, torch.tensor([3, -2]), implementation=name)
        ops.flush_group(*both, *rings, paged, torch.tensor([32, 0]), torch.tensor([6, -1]), implementation=name)
        read = ops.dequantize_pages(*both, paged, torch.tensor([[1, 3]]), implementation=name)
        q = ops.prepare_query(*both, pages[0], HEADS, implementation=name)
        found[name] = [bad, pool, bad_pages, paged, *read, q]
    for got, want in zip(found["jax"], found["reference"], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert found["jax"][0].tolist() == [[0] * 5, [0, 0, 0, 1, 0]]


def test_implementations():
    cpu = torch.device("cpu")
    assert backends.find(cpu) is reference is backends.find(cpu, "reference")
    with pytest.raises(JkvError, match="implementation='launch' is not possible on cpu"):
        backends.find(cpu, "launch")
    with pytest.raises(JkvError, match="implementation='triton' is unknown; choose one of launch, jax, reference"):
        backends.find(cpu, "triton")


def sample(name: str) -> tuple[Any, ...]:
    """Operands of one op, positional, as ``torch.ops.jkv`` takes them."""
    rows, at, page = filled(caching.FAMILIES[5]), side(TOKEN), side(PAGE)
    token_scheme = (pack(at.description, at.tensors), text_of(at.description))
    page_scheme = (pack(page.description, page.tensors), text_of(page.description))
    own = (pack(rows.at.description, rows.at.tensors), text_of(rows.at.description))
    tail, sinks = rows.exact.tail, rows.exact.sinks
    held = (rows.sealed, *(x.nan_to_num() for x in (*tail, *sinks)), *own)
    where = (rows.pool, rows.block_table, rows.lengths)
    ring, start, entry = [x.nan_to_num()[:3] for x in tail], torch.tensor([0, 32, 0]), torch.tensor([0, 1, -1])
    counts, two = torch.full((BATCH,), 2), [torch.tensor([0, 1, 40], dtype=torch.int32) for _ in range(2)]
    kept = [torch.zeros(2, 3, HEADS, n, 64, dtype=torch.bfloat16) for n in (32, 2)]
    given = {
        "prepare_query": (rows.q[:, :2], *token_scheme, HEADS, 30.0),
        "write_kv": (*new(3), pool_of(TOKEN), torch.tensor([0, -1, 9]), *token_scheme),
        "write_pages": (*new(2, 32), pool_of(PAGE), torch.tensor([0, -1]), *page_scheme),
        "flush_group": (*ring, pool_of(PAGE), start, entry, *page_scheme),
        "append_tail": (*new(3, 1), *kept, *two, None, two[0]),
        "decode_attention": (rows.q[:, :1], *where, *held, None, None, 40, 0.2),
        "extend_attention": (rows.q[:, :2], rows.k[:, :2], rows.v[:, :2], *where, counts, counts - 2, *held),
        "dequantize_pages": (pool_of(PAGE), torch.tensor([[0, 1]]), *page_scheme),
    }
    return given[name]


@pytest.mark.parametrize("name", op_definitions.SCHEMAS)
def test_ops_keep_their_word(name):
    """Schema, mutation, fake tensors and tracing, as torch checks them; nothing is recorded for gradients."""
    torch.library.opcheck(getattr(torch.ops.jkv, name).default, sample(name))
    out = getattr(torch.ops.jkv, name)(*(x.clone().requires_grad_() if _is_float(x) else x for x in sample(name)))
    assert not any(x.requires_grad for x in (out if isinstance(out, tuple) else (out,)) if x is not None)


def _is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.float32


@pytest.mark.parametrize("spec", ["kivi:bits=2,sink=3", "flagrot-auto:bits=2,mode=key,tail=0"])
def test_a_decoding_step_is_one_graph(spec):
    """torch.compile(fullgraph=True) over a step of two layers, past the end of a page."""

    def step(cache, q, k, v):
        now = cache.step()
        for layer in range(2):
            cache.append(layer, k, v, now)
            q = cache.attend(layer, q, pending=now)
        cache.seal(now)
        return q

    plain = empty(spec, 3, 2)
    traced, compiled = copy.deepcopy(plain), torch.compile(step, fullgraph=True, backend="aot_eager")
    q, k, v = random(3, 34)
    for t in range(34):
        now = [x[:, t : t + 1] for x in (q, k, v)]
        torch.testing.assert_close(compiled(traced, *now), step(plain, *now), rtol=0, atol=0)
    for layer in range(2):
        assert torch.equal(traced.layers[layer].pool, plain.layers[layer].pool)
    assert traced.length.tolist() == [34] * 3 and not traced.nonfinite.any()


def test_a_scheme_as_text_and_its_arrays_as_a_list():
    at = side(TOKEN)
    text, arrays = text_of(at.description), pack(at.description, at.tensors)
    assert description_of(text) == at.description and description_of(str(text)) is description_of(text)
    found = unpack(at.description, arrays)
    assert all(found[side][name] is x for side, part in at.tensors.items() for name, x in part.items() if side in found)
    (k, v), slots = new(3), torch.arange(3)
    pools = [pool_of(TOKEN) for _ in range(2)]
    ops.write_kv(at.description, at.tensors, k, v, pools[0], slots)
    ops.write_kv(text, arrays, k, v, pools[1], slots)
    assert torch.equal(*pools)
    with pytest.raises(
        JkvError, match=r"calib has 4 arrays; 'flagrot-auto:.* reads 6: k/scale_mult, k/zero_mult, k/mean"
    ):
        ops.write_kv(text, arrays[:4], k, v, pools[0], slots)
    with pytest.raises(JkvError, match="calib lacks k/scale_mult, which"):
        ops.write_kv(at.description, side("bf16").tensors, k, v, pools[0], slots)
    with pytest.raises(JkvError, match="a scheme's description is no JSON"):
        ops.write_kv("kivi", arrays, k, v, pools[0], slots)


@pytest.mark.parametrize("implementation", ["reference", "jax"])
@pytest.mark.parametrize(
    "change, words",
    [
        ({"slot_mapping": torch.tensor([0, 256, 300])}, r"slot_mapping\[1\]=256 is out of range"),
        ({"slot_mapping": torch.zeros(3)}, r"slot_mapping of shape \(3,\) and dtype float32"),
        ({"k": torch.ones(3, 2, 64, dtype=torch.float64)}, "k of shape .* and dtype float64 does not fit"),
        ({"v": torch.ones(3, 1, 64)}, r"v of shape \(3, 1, 64\)"),
        ({"pool": torch.zeros(4, 2, 100, dtype=torch.uint8)}, r"pool of shape .* for pages of 'fp8'"),
        ({"pool": torch.zeros(4, 2, 8192, dtype=torch.uint8)[:, :, :4096]}, "pool with strides .* must be contiguous"),
        ({"pool": torch.zeros(4, 3, 4096, dtype=torch.uint8)}, "k of shape"),
        ({"k": torch.ones(3, 2, 64, device=META)}, "k is on device meta; it must be on cpu"),
    ],
)
def test_bad_operands_change_nothing(implementation, change, words):
    """Again and again, after operands of a good form too: what has passed is remembered, what has not is not."""
    at, pool = side("fp8"), pool_of("fp8")
    given = {
        "k": torch.ones(3, 2, 64),
        "v": torch.ones(3, 2, 64),
        "pool": pool,
        "slot_mapping": torch.tensor([0, -7, 9]),
    }
    call = functools.partial(ops.write_kv, at.description, at.tensors, implementation=implementation)
    for _ in range(2):
        before = (given | change)["pool"].clone()
        with pytest.raises(JkvError, match=rf"^{words}"):
            call(**(given | change))
        assert torch.equal((given | change)["pool"], before)
        if implementation == "reference":
            call(**given)


def test_bad_attention():
    rows = filled("kivi:bits=2")
    call = functools.partial(ops.decode_attention, rows.at.description, rows.at.tensors, rows.q[:, :1])
    held = attention_of(rows)
    for change, words in (
        ({"tail": (rows.exact.tail[0], rows.exact.tail[1][:1])}, "tail v of shape"),
        ({"tail": (rows.exact.tail[0], None)}, "tail has only one of keys and values"),
        ({"lengths": rows.lengths.float()}, "lengths of shape .* and dtype float32"),
        ({"options": AttentionOptions(softcap=1.0)}, "softcap is not possible with scheme 'kivi:bits=2'"),
        ({"block_table": torch.full_like(rows.block_table, 99)}, r"block_table\[\d, 0\]=99 is out of range"),
        ({"pool": rows.pool.to(META)}, "pool is on device meta; it must be on cpu"),
    ):
        with pytest.raises(JkvError, match=rf"^{words}"):
            call(**(held | change))


def test_checks_run_once_for_a_form():
    seen = []
    check = Once(lambda x, arrays, number: seen.append((x.shape, number)))
    a, b = torch.zeros(3), torch.zeros(4)
    for x in (a, a.clone(), b):
        check(x, [a, b], 1)
    check(a, [a, b], 2)
    check(a[::2], [a, b], 2)
    assert [number for _, number in seen] == [1, 1, 2, 2] and seen[1][0] == (4,)
    for number in range(1000):
        check(a, [], number)
    assert len(check._passed) <= 256
    np.testing.assert_equal(len(seen), 1004)
