"""What is refused, by name, value and what is allowed, before a byte has changed."""

from __future__ import annotations

import functools

import pytest
import torch

from jkv.errors import JkvError
from jkv.options import AttentionOptions
from tests import cases
from tests.torch_bridge.bridge import side
from torch_bridge.binding import bind_layers
from torch_bridge.describe import describe
from torch_bridge.operands import entries_of
from torch_bridge.reference import (
    Exact,
    dequantize_pages,
    flush_group,
    paged_attention,
    prepare_query,
    write_kv,
    write_pages,
)

META = torch.device("meta")


def args_of_write(spec: str = "fp8") -> dict:
    at = side(spec)
    pool = torch.zeros(4, 2, 2 * at.description.page.nbytes, dtype=torch.uint8)
    x = torch.ones(3, 2, 64)
    return {
        "description": at.description,
        "calib": at.tensors,
        "k": x,
        "v": x,
        "pool": pool,
        "slot_mapping": torch.tensor([0, -7, 9]),
    }


def refused(function, words: str, **arguments) -> None:
    before = arguments["pool"].clone() if arguments["pool"].device.type == "cpu" else None
    with pytest.raises(JkvError, match=rf"^{words}"):
        function(**arguments)
    assert before is None or torch.equal(arguments["pool"], before)


@pytest.mark.parametrize(
    "change, words",
    [
        (
            {"slot_mapping": torch.tensor([0, 256, 300])},
            r"slot_mapping\[1\]=256 is out of range; it must be below 256, or",
        ),
        (
            {"slot_mapping": torch.zeros(2, dtype=torch.int32)},
            r"slot_mapping of shape \(2,\).* must be int32 or int64 \[3\]",
        ),
        ({"slot_mapping": torch.zeros(3)}, r"slot_mapping of shape \(3,\) and dtype float32 does not fit"),
        (
            {"slot_mapping": torch.zeros(3, dtype=torch.int32, device=META)},
            "slot_mapping is on device meta; it must be on cpu",
        ),
        (
            {"k": torch.ones(3, 2, 32)},
            r"k of shape \(3, 2, 32\) .* must be float32 or bfloat16 or float16 \[any, 2, 64\]",
        ),
        ({"k": torch.ones(3, 2, 64, dtype=torch.float64)}, "k of shape .* and dtype float64 does not fit"),
        ({"v": torch.ones(3, 1, 64)}, r"v of shape \(3, 1, 64\) .* \[3, 2, 64\]"),
        ({"v": torch.ones(3, 2, 64, device=META)}, "v is on device meta"),
        (
            {"pool": torch.zeros(4, 2, 100, dtype=torch.uint8)},
            r"pool of shape .* \[num_blocks, num_kv_heads, n \* 4096\] for pages of 'fp8' at head_dim 64",
        ),
        ({"pool": torch.zeros(4, 2, 4096, dtype=torch.int8)}, "pool of shape .* and dtype int8 does not fit"),
        ({"pool": torch.zeros(4, 2, 8192, dtype=torch.uint8)[:, :, :4096]}, "pool with strides .* must be contiguous"),
        (
            {"pool": torch.zeros(8 * 4096 + 1, dtype=torch.uint8)[1:].view(4, 2, 4096)},
            "pool with strides .* aligned to 16 bytes",
        ),
        ({"pool": torch.zeros(4, 3, 4096, dtype=torch.uint8)}, "k of shape"),
    ],
)
def test_tokens_that_cannot_be_written(change, words):
    refused(write_kv, words, **(args_of_write() | change))


def test_whole_pages_only():
    refused(write_kv, "scheme 'kivi:bits=2' encodes whole pages; use flush_group", **args_of_write("kivi:bits=2"))


def test_arrays_of_another_scheme_or_model():
    made = args_of_write("rtn:bits=4,rotation=head,center=on")
    del made["calib"]
    refused(write_kv, "calib lacks k/scale_mult, which 'rtn:bits=4,", calib=side("bf16").tensors, **made)
    refused(write_kv, "calib lacks k/mean", calib=side("rtn:bits=4").tensors, **made)
    (wide,) = bind_layers([describe("rtn:bits=4,center=on", 128)], cases.calibration(128), 2)
    refused(write_kv, r"calib k/mean of shape \(2, 128\) .* \[2, 64\]", calib=wide, **made)
    (four,) = bind_layers([describe("rtn:bits=4,center=on", 64)], cases.calibration(64, heads=4), 4)
    refused(write_kv, r"calib k/scale_mult of shape \(4,\) .* \[2\]", calib=four, **made)
    key = args_of_write("flagrot-auto:bits=2,mode=key")
    without = {**key["calib"], "k": {n: a for n, a in key["calib"]["k"].items() if n != "w_root"}}
    refused(write_kv, "calib lacks k/w_root", **(key | {"calib": without}))


def test_pages_and_rings():
    made = args_of_write("kivi:bits=2")
    both = {name: made[name] for name in ("description", "calib", "pool")}
    x, page = torch.ones(3, 32, 2, 64), torch.tensor([0, 8, 1])
    refused(write_pages, r"page\[1\]=8 is out of range; it must be below 8", k=x, v=x, page=page, **both)
    refused(write_pages, r"k of shape .* \[any, 32, 2, 64\]", k=x[:, :31], v=x, page=page, **both)
    ring, zero = torch.zeros(3, 2, 64, 64, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int32)
    call = functools.partial(refused, flush_group, **both)
    rings = {"tail_k": ring, "tail_v": ring}
    call(r"start\[2\]=40 is out of range; it must be below 33", start=torch.tensor([0, 0, 40]), page=zero, **rings)
    call(r"page of shape \(2,\)", start=zero, page=zero[:2], **rings)
    wide = {name: x.float() for name, x in rings.items()}
    call("tail_k of shape .* and dtype float32 does not fit; it must be bfloat16", start=zero, page=zero, **wide)
    call("tail_k has a ring of 40 tokens", tail_k=ring[:, :, :40], tail_v=ring[:, :, :40], start=zero, page=zero)


def args_of_attention(spec: str = "fp8") -> dict:
    made = args_of_write(spec)
    return {name: made[name] for name in ("description", "calib", "pool")} | {
        "q": torch.ones(2, 1, 4, 64),
        "block_table": torch.tensor([[0, 1], [2, 2**30]], dtype=torch.int32),
        "lengths": torch.tensor([100, 64]),
    }


RING = torch.zeros(2, 2, 32, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"q": torch.ones(2, 1, 3, 64)}, r"q of shape \(2, 1, 3, 64\) .* a multiple of 2 query heads"),
        ({"q": torch.ones(2, 1, 4, 128)}, r"q of shape \(2, 1, 4, 128\) .* \[any, any, any, 64\]"),
        ({"q": torch.ones(2, 1, 4, 64, dtype=torch.int32)}, "q of shape .* and dtype int32 does not fit"),
        ({"q": torch.ones(2, 1, 4, 64, device=META)}, "q is on device meta; it must be on cpu"),
        ({"block_table": torch.tensor([[0, 1]])}, r"block_table of shape \(1, 2\)"),
        (
            {"block_table": torch.tensor([[0, 1], [4, 0]])},
            r"block_table\[1, 0\]=4 is out of range; blocks go from 0 to 3",
        ),
        ({"block_table": torch.tensor([[0, -1], [1, 0]])}, r"block_table\[0, 1\]=-1 is out of range"),
        (
            {"lengths": torch.tensor([129, 0])},
            r"lengths=\[129, 0\] are not allowed; rows have blocks for 0 to 128 tokens",
        ),
        ({"lengths": torch.tensor([-1, 0])}, r"lengths=\[-1, 0\] are not allowed"),
        ({"lengths": torch.tensor([1.0, 0.0])}, "lengths of shape .* and dtype float32 does not fit"),
        ({"lengths": torch.zeros(2, dtype=torch.int32, device=META)}, "lengths is on device meta; it must be on cpu"),
        ({"lengths": torch.tensor([1, 2, 3])}, r"lengths of shape \(3,\) .* must be int32 or int64, one number a row"),
        ({"sealed": torch.tensor([99, 64])}, r"lengths=\[100, 64\] with sealed=\[99, 64\] .* the tail has 0 slots"),
        ({"exact": Exact(tail=(RING.float(), RING.float()))}, "tail k of shape .* and dtype float32 does not fit"),
        ({"exact": Exact(tail=(RING, RING[:1]))}, r"tail v of shape \(1, 2, 32, 64\)"),
        ({"exact": Exact(sinks=(RING[:, :1], RING))}, r"sinks k of shape .* \[2, 2, any, 64\]"),
        ({"exact": Exact(fresh=(RING, RING))}, r"fresh k of shape .* \[2, 1, 2, 64\]"),
        (
            {"exact": Exact(fresh=(RING[:, :1, :2], RING[:, :1, :2])), "counts": 2},
            r"counts=\[2, 2\] after start=\[0, 0\] do not fit a chunk of 1",
        ),
        ({"options": AttentionOptions(softcap=-1.0)}, "softcap=-1.0 is not allowed; softcap must be above 0"),
        ({"options": AttentionOptions(window=0)}, "window=0 is not allowed"),
        ({"options": AttentionOptions(sink_logits=torch.zeros(3))}, r"sink_logits of shape \(3,\) .* \[4\]"),
    ],
)
def test_attention_that_does_not_fit(change, words):
    refused(paged_attention, words, **(args_of_attention() | change))


@pytest.mark.parametrize("options", [AttentionOptions(softcap=20.0), AttentionOptions(sink_logits=torch.zeros(4))])
def test_options_that_centred_keys_do_not_allow(options):
    words = r"(softcap|sink_logits) is not possible with scheme 'kivi:bits=2'.*use center=off"
    refused(paged_attention, words, **(args_of_attention("kivi:bits=2") | {"options": options}))


def test_blocks_and_queries_elsewhere():
    made = args_of_attention()
    both = {name: made[name] for name in ("description", "calib", "pool")}
    refused(dequantize_pages, r"block_table\[1, 0\]=4 is out of range", block_table=torch.tensor([0, 4]), **both)
    refused(dequantize_pages, "block_table of shape .* and dtype float32", block_table=torch.zeros(1, 2), **both)
    with pytest.raises(JkvError, match=r"^q .* a multiple of 3 query heads"):
        prepare_query(made["description"], made["calib"], made["q"], 3)


def test_entries_beyond_int32_stay_beyond_every_pool():
    given = torch.tensor([0, 7, -1, -5, 2**31 - 1, 2**31, 2**32 + 5, -(2**32) + 5, 2**63 - 1])
    assert entries_of(given).tolist() == [0, 7, -1, -1, *[2**31 - 1] * 3, -1, 2**31 - 1]
    assert entries_of(torch.tensor([3, -9], dtype=torch.int32)).tolist() == [3, -9]
