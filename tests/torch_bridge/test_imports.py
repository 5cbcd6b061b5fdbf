"""A process that serves imports no JAX, and one without torch still describes."""

from __future__ import annotations

import subprocess
import sys

from tests import cases
from torch_bridge.describe import describe

_SERVE = """
import sys, torch
import torch_bridge.cache, torch_bridge.description, torch_bridge.ops, torch_bridge.rows, jkv.calibration
from jkv.calibration import load
from torch_bridge.binding import bind_layers
from torch_bridge.description import from_json
from torch_bridge.ops import decode_attention, write_kv

description = from_json(open(sys.argv[1]).read())
(calib,) = bind_layers([description], load(sys.argv[2]), 2)
pool = torch.zeros(2, 2, 2 * description.page.nbytes, dtype=torch.uint8)
k = torch.randn(5, 2, 64)
write_kv(description, calib, k, k, pool, torch.arange(5))
out = decode_attention(description, calib, torch.randn(1, 1, 4, 64), pool, torch.tensor([[0]]), torch.tensor([5]))
assert out.isfinite().all() and out.abs().max() > 0
print(sorted(name for name in sys.modules if name.split(".")[0] in ("jax", "jaxlib", "flax", "ml_dtypes")))
"""


def run(code: str, *arguments: str) -> str:
    made = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def test_serving_imports_no_jax(tmp_path):
    path = tmp_path / "scheme.json"
    path.write_text(describe("flagrot-auto:bits=2,tail=0", 64).to_json())
    calibration = cases.calibration(64).save(tmp_path / "calib.safetensors")
    assert run(_SERVE, str(path), str(calibration)) == "[]"


def test_describing_imports_no_torch():
    code = "import sys, torch_bridge.describe, jkv.calibration; print('torch' in sys.modules)"
    assert run(code) == "False"
