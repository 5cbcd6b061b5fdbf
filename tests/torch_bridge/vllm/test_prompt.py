"""Prompts whose context is read back page by page, as launched kernels do it, and the attention they go through."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

from jkv.options import AttentionOptions
from jkv.units import PAGE_TOKENS
from tests.torch_bridge.vllm.engine import GROUP, HEADS, Engine
from torch_bridge import reference
from torch_bridge.vllm import flash, prompt

CONTEXTS = [(0, 70), (32, 65), (40, 80), (64, 100), (161, 90)]


def read_pages(description: Any, calib: Any, pool: Tensor, page: Tensor, row: Tensor, k: Tensor, v: Tensor) -> None:
    """What :meth:`torch_bridge.launched.backend.LaunchedBackend.read_pages` does, one page after the other."""
    per_block = pool.shape[2] // description.page.nbytes
    blocks = reference.dequantize_pages(description, calib, pool, torch.arange(len(pool)))
    for x, all_ in zip((k, v), blocks, strict=True):
        pages = all_.unflatten(2, (per_block, PAGE_TOKENS)).transpose(1, 2).flatten(0, 1).transpose(1, 2)
        for at, first in zip(page.tolist(), row.tolist(), strict=True):
            if at >= 0:
                own = x[first : first + PAGE_TOKENS]
                own.copy_(pages[at, : len(own)])


def steps(engine: Engine) -> None:
    rows = []
    for before, count in CONTEXTS:
        request = engine.request(before + count)
        while request.computed < before:
            engine.step([(request, min(37, before - request.computed))])
        rows.append((request, count))
    engine.step(rows)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("spec", ["kivi:bits=2", "rtn:bits=4,rotation=head,center=on", "ultraquant:tail=0"])
def test_pages_are_read_into_place(spec, window, monkeypatch):
    read = []

    def counted(*operands: Any) -> None:
        read.append(len(operands[3]))
        read_pages(*operands)

    monkeypatch.setattr(prompt, "find", lambda *_: types.SimpleNamespace(read_pages=counted))
    steps(Engine(spec, options=AttentionOptions(window=window)))
    at_once = "tail=0" in spec
    whole = [-(-before // PAGE_TOKENS) if at_once else before // PAGE_TOKENS for before, _ in CONTEXTS if before]
    assert read == (whole if window is None else [*whole[:-1], whole[-1] - 2]), "blocks that nobody sees are left out"


@pytest.mark.parametrize(
    "options",
    [AttentionOptions(), AttentionOptions(window=40, softcap=5.0, sink_logits=torch.ones(HEADS * GROUP), scale=0.3)],
    ids=["plain", "options"],
)
def test_what_flash_attention_is_told(options, monkeypatch):
    """Its arguments mean what ours do: a plain function of the same arguments gives the expected results."""
    told: list[dict[str, Any]] = []

    def function(**given: Any) -> Tensor:
        told.append(given)
        left, right = given["window_size"]
        assert given["causal"] and right == (-1 if options.window is None else 0)
        assert given["cu_seqlens_q"].tolist() == [0, len(given["q"])] and given["max_seqlen_q"] == len(given["q"])
        assert given["cu_seqlens_k"].tolist() == [0, len(given["k"])] and given["max_seqlen_k"] == len(given["k"])
        assert {given[name].dtype for name in ("cu_seqlens_q", "cu_seqlens_k")} == {torch.int32}
        again = AttentionOptions(
            given["softcap"] or None, None if left < 0 else left + 1, given["s_aux"], given["softmax_scale"]
        )
        k, v = (given[name].transpose(0, 1) for name in "kv")
        return prompt._with_options(given["q"], k, v, again)

    monkeypatch.setattr(prompt, "flash_attention", lambda q, options: flash.FlashAttention(function, 3))
    steps(Engine("ultraquant", options=options))
    assert len(told) == len(CONTEXTS) and all(given["fa_version"] == 3 for given in told)


def test_no_flash_attention_on_a_cpu():
    assert flash.flash_attention(torch.zeros(1, 2, 64, dtype=torch.bfloat16), AttentionOptions()) is None
