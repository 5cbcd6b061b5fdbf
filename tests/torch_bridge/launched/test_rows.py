"""Steps over an engine's memory: which launches a layer makes, and of what. Their results: tests of the vLLM layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jkv.options import AttentionOptions
from jkv.plan import plan_layers
from jkv.registry import parse
from jkv.units import PAGE_TOKENS
from tests import cases
from tests.torch_bridge.launched.backends import fake_backend
from torch_bridge.binding import to_tensors
from torch_bridge.describe import describe_layers
from torch_bridge.launched.rows import RowLaunches
from torch_bridge.store import Scheme
from torch_bridge.vllm.batch import Singles

HEADS, DIM, ROWS, PLACES, BLOCKS, WIDTH = 2, 64, 3, 5, 7, 4


def scheme_of(spec: str) -> Scheme:
    (description,) = describe_layers(spec, DIM, 1)
    (part,) = plan_layers(parse(spec), 1).layers
    return Scheme.of(description, to_tensors(cases.bound(part, DIM, HEADS)))


def singles() -> Singles:
    names = {name: torch.zeros(ROWS, dtype=torch.int32) for name in Singles._fields}
    return Singles(**names | {"block_table": torch.zeros(ROWS, WIDTH, dtype=torch.int32)})


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("spec", ["rtn:bits=4,rotation=head,center=on", "ultraquant:tail=0"])
def test_launches(spec: str, window: int | None, tmp_path: Path):
    scheme, rows = scheme_of(spec), singles()
    waits = scheme.description.windows.tail_tokens > 0
    waiting = torch.zeros(2, PLACES, HEADS, PAGE_TOKENS, DIM, dtype=torch.bfloat16) if waits else None
    pool = torch.zeros(BLOCKS, HEADS, 2 * scheme.description.page.nbytes, dtype=torch.uint8)
    q, k, v = (torch.randn(ROWS, heads, DIM, dtype=torch.bfloat16) for heads in (2 * HEADS, HEADS, HEADS))
    out = torch.empty_like(q)
    with fake_backend(tmp_path) as (backend, driver):
        layer = RowLaunches(backend, scheme, AttentionOptions(window=window), waiting)
        for _ in range(2):
            driver.launched.clear()
            assert layer.write(k, v, pool, rows) and layer.attend(q, pool, rows, out)
            names = [launched.entry for launched in driver.launched]
            wanted = ["jkv_append", "jkv_flush"] if waits else ["jkv_write"]
            assert [name.split("_")[1] for name in names[: len(wanted)]] == [name[4:] for name in wanted], names
            assert len(names) == len(wanted) + 3 and names[-1] == "jkv_combine"
        everything = {address for launched in driver.launched for address in launched.addresses}
        tensors = [q, k, v, pool, out, rows.total, rows.sealed, rows.block_table]
        tensors += [rows.slot] if waiting is None else [rows.place, rows.page, rows.active, waiting[0], waiting[1]]
        assert {x.data_ptr() for x in tensors} <= everything
        assert int(layer.nonfinite()) == 0
        # A part of what a layer made is copied to where kernels can load it.
        wide = torch.randn(ROWS, 3 * HEADS, DIM, dtype=torch.bfloat16)
        assert layer.write(wide[:, :HEADS], wide[:, HEADS : 2 * HEADS], pool, rows)
        assert not layer.write(k[:2], v[:2], pool, rows)
        assert not layer.attend(q, pool, rows, out.float())
