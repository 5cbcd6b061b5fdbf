"""One process lowers for this one, and a new one takes over where it has ended."""

from __future__ import annotations

import os
from pathlib import Path

from pallas_kernels.bundle.read import load_bundle
from torch_bridge.lowering_worker import Worker

FACTS = {"head_dim": 64, "num_kv_heads": 2}


def test_one_process_serves_until_it_ends(tmp_path: Path):
    worker = Worker()

    def lower(name: str, facts: dict[str, int]) -> str:
        return worker.lower(str(tmp_path / name), "sm_90", "append", facts)

    assert lower("first", FACTS) == ""
    process = worker._process
    assert process is not None and load_bundle(tmp_path / "first")
    assert "is unknown" in worker.lower(str(tmp_path / "no"), "sm_1", "append", FACTS)
    assert worker._process is process and process.poll() is None
    process.kill()
    process.wait()
    assert lower("second", FACTS | {"tail": 64}) == ""
    assert worker._process is not process and load_bundle(tmp_path / "second")
    taken = worker._process
    assert taken is not None
    worker._owner = os.getppid()  # as in a fork
    assert lower("third", FACTS | {"sinks": 4}) == "" and worker._process is not taken
    worker.close()
    assert worker._process is None
