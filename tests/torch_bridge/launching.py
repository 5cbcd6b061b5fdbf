"""Whole operations by launches: what ops do, without their checks and caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jkv.units import PAGE_TOKENS, Windows
from tests.torch_bridge.bridge import HEADS, Side
from tests.torch_bridge.paged import BLOCK_TOKENS, Filled
from torch_bridge.launch import Library
from torch_bridge.launched.arrays import write_arrays
from torch_bridge.launcher import Launcher
from torch_bridge.level_table import level_table

Operands = dict[str, Tensor]


def run(kernel: Launcher, sizes: dict[str, int], operands: Operands) -> None:
    """One launch; its results join the operands."""
    for argument in kernel.kernel.arguments:
        if argument.role == "out":
            operands[argument.name] = kernel.empty(argument.name, sizes)
    kernel.launch(sizes, *(operands[name] for name in kernel.names))


def calibration(at: Side, device: torch.device) -> Operands:
    """A layer's arrays as attention takes them."""
    found = {f"{side}/{name}": a.to(device, copy=True) for side in "kv" for name, a in at.tensors[side].items()}
    return found | {f"{name[0]}/table": level_table(a) for name, a in found.items() if name.endswith("/levels")}


def attention_facts(rows: Filled, steps: int = 1) -> dict[str, Any]:
    windows: Windows = rows.at.description.windows
    return {
        "spec": rows.at.description.spec,
        "head_dim": rows.q.shape[3],
        "num_kv_heads": HEADS,
        "gqa": rows.q.shape[2] // HEADS,
        "tail": windows.tail_tokens,
        "sinks": windows.sink,
        "steps": steps,
        "fresh": steps > 1,
    }


def attend(library: Library, rows: Filled, operands: Operands, splits: int, steps: int = 1) -> Tensor:
    """Attention of ``operands`` (:func:`attention_operands`) by three launches: ``[B, T, Hq, D]``."""
    sizes = {
        "batch": rows.q.shape[0],
        "splits": splits,
        "width": rows.block_table.shape[1],
        "blocks": rows.pool.shape[0],
    }
    operands["sizes"] = library.sizes(sizes)
    for op in ("prepare", "split", "combine"):
        run(library.kernel(op, **attention_facts(rows, steps)), sizes, operands)
    return operands["out"].view(rows.q.shape[0], steps, *rows.q.shape[2:])


def attention_operands(rows: Filled, device: torch.device, steps: int = 1) -> Operands:
    """Everything that attention reads, on a device; fresh keys and values are the first ones of the row."""
    exact, total = rows.exact, rows.lengths
    sinks = rows.at.description.windows.sink
    found = {
        "q": rows.q[:, :steps].to(torch.bfloat16).contiguous(),
        "pool": rows.pool,
        "block_table": rows.block_table,
        "stored": torch.minimum(rows.sealed, total),
        "first": torch.full_like(total, sinks),
        "total": total,
        "sealed": rows.sealed,
        "start": torch.zeros_like(total),
        "counts": torch.full_like(total, steps if steps > 1 else 0),
    }
    for name, pair in (("tail", exact.tail), ("sinks", exact.sinks)):
        if pair is not None:
            found |= {f"{name}_{side}": x.to(torch.bfloat16) for side, x in zip("kv", pair, strict=True)}
    if steps > 1:
        pair = (rows.k[:, :steps], rows.v[:, :steps])
        found |= {f"fresh_{side}": x.to(torch.bfloat16) for side, x in zip("kv", pair, strict=True)}
    found = {name: x.contiguous().to(device, copy=True) for name, x in found.items()}
    return found | calibration(rows.at, device)


def write(
    library: Library, at: Side, op: str, operands: Operands, count: int, device: torch.device, tail: int = PAGE_TOKENS
) -> Operands:
    """One launch of a write kernel; the pool among the operands is updated."""
    sizes = {"pages" if op != "write" else "tokens": count, "blocks": operands["pool"].shape[0]}
    dim = at.description.head_dim
    made = {name: x.contiguous().to(device, copy=True) for name, x in operands.items()}
    made |= {name: x.to(device, copy=True) for name, x in write_arrays(at.description, at.tensors).items()}
    made["sizes"] = library.sizes(sizes)
    facts = {"spec": at.description.spec, "head_dim": dim, "num_kv_heads": HEADS, "block_tokens": BLOCK_TOKENS}
    run(library.kernel(op, tail=tail, **facts), sizes, made)
    return made
