"""Stored pages keep their bytes: whoever has a cache on disk or in another process must be able to read it."""

from __future__ import annotations

import json

import pytest

from ..cases import SPECS
from . import make

GOLDEN = json.loads(make.FILE.read_text())


def test_every_layout_is_pinned():
    """Each spec of the table at each head_dim, and with them every distinct layout."""
    assert set(GOLDEN) == {f"{spec} @ {head_dim}" for spec in SPECS for head_dim in make.HEAD_DIMS}


@pytest.mark.parametrize("head_dim", make.HEAD_DIMS)
@pytest.mark.parametrize("spec", SPECS)
def test_page_bytes(spec, head_dim):
    pinned = GOLDEN[f"{spec} @ {head_dim}"]
    made = make.golden(spec, head_dim, pinned["seed"])
    assert made["fields"] == pinned["fields"], "first bytes of a field; see tests/golden/make.py"
    assert made == pinned
