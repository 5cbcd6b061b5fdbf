"""``jkv bench --tune``: the fastest launch parameters of each layout on this device, in the form config.py reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jkv.errors import JkvError
from jkv.registry import parse
from pallas_kernels.bench import decode, kernels
from pallas_kernels.bench.candidates import Trial, best, candidates, split_candidates
from pallas_kernels.bench.cases import BenchCase
from pallas_kernels.bench.result import device_name
from pallas_kernels.config import TUNED, DecodeConfig, layout_key


def tune(cases: Sequence[BenchCase], target: Path, step: Callable[..., None]) -> tuple[str, list[str]]:
    """Try every candidate for one case of each layout and GQA ratio; the new table's text, and a line a layout.

    Lines of ``target`` for other layouts stay. One case a layout: the first of ``cases`` at the largest batch.

    Raises:
      JkvError: where ``target`` holds another device's table.
    """
    device, old = device_name(), read(target)
    if old is not None and old["device"] != device:
        raise JkvError(
            f"{str(target)!r} is the table of {old['device']}, and this device is {device}; give another file"
        )
    chosen = one_a_layout(cases)
    new, lines = [], []
    for index, case in enumerate(chosen):
        step(index, len(chosen), f"tuning {case.scheme}")
        found, trials = _try_all(case)
        failed = sum(trial.time_ms is None for trial in trials)
        title = f"{case.scheme} head_dim {case.head_dim} gqa {case.group}"
        if found is None:
            lines.append(f"{title}: none of {len(trials)} configurations runs here; the first: {trials[0].why}")
            continue
        winner, split = found
        new.append(entry(case, winner, split))
        lines.append(f"{title}: {winner.time_ms:.3f} ms with {words(winner.config)}; {failed} of {len(trials)} failed")
    return dumps(merged(old, device, new)), lines


def _try_all(case: BenchCase) -> tuple[tuple[Trial, Trial | None] | None, list[Trial]]:
    with_cache = decode.Prepared(case)
    names = kernels.available(parse(case.scheme), case.head_dim)
    found, trials = best(candidates(case, names), with_cache.seconds)
    if found is None:
        return None, trials
    split, _ = best(split_candidates(case, found.config), with_cache.seconds)
    return (found, split), trials


def one_a_layout(cases: Sequence[BenchCase]) -> list[BenchCase]:
    """The case of each (layout, head_dim, GQA ratio) with the most stored tokens."""
    found: dict[tuple[Any, ...], BenchCase] = {}
    for case in cases:
        key = (layout_key(parse(case.scheme), case.head_dim), case.head_dim, case.group)
        if key not in found or found[key].batch * found[key].context < case.batch * case.context:
            found[key] = case
    return list(found.values())


def words(config: DecodeConfig) -> str:
    """A configuration for people."""
    return ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items() if name != "num_splits")


def read(path: Path) -> dict[str, Any] | None:
    """A table that is there already.

    Raises:
      JkvError: for a file that is no table.
    """
    if not path.exists():
        return None
    try:
        table = json.loads(path.read_text("utf-8"))
        if isinstance(table["device"], str) and isinstance(table["entries"], list):
            return table
    except (ValueError, KeyError, TypeError):
        pass
    raise JkvError(f"{str(path)!r} is no table of launch parameters; give another file, or remove it")


def default_path() -> Path:
    """The table of this device in the package."""
    return TUNED / file_name(device_name())


def entry(case: BenchCase, chosen: Trial, split: Trial | None) -> dict[str, Any]:
    """A line of a device's table, and beside it the shape that was measured and the best explicit splits there."""
    measured: dict[str, Any] = {key: getattr(case, key) for key in ("batch", "context", "num_kv_heads", "block_tokens")}
    measured["time_ms"] = chosen.time_ms
    if split is not None:
        measured |= {"best_splits": split.config.num_splits, "best_splits_time_ms": split.time_ms}
    return {
        "key": layout_key(parse(case.scheme), case.head_dim),
        "spec": case.scheme,
        "head_dim": case.head_dim,
        "gqa": case.group,
        **dataclasses.asdict(chosen.config),
        "measured": measured,
    }


def merged(old: dict[str, Any] | None, device: str, new: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The table with new lines in the place of those for the same layout, head_dim and GQA ratio."""

    def place(line: dict[str, Any]) -> tuple[Any, ...]:
        return line["key"], line["head_dim"], line["gqa"]

    kept = {place(line): line for line in ((old or {}).get("entries") or [])}
    kept |= {place(line): line for line in new}
    return {"device": device, "entries": [kept[key] for key in sorted(kept, key=str)]}


def file_name(device: str) -> str:
    """``NVIDIA H200`` -> ``nvidia-h200.json``."""
    return "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split()) + ".json"


def dumps(table: dict[str, Any]) -> str:
    """One line an entry, so that a new measurement is a small difference."""
    lines = ",\n".join("  " + json.dumps(line) for line in table["entries"])
    return f'{{"device": {json.dumps(table["device"])}, "entries": [\n{lines}\n]}}\n'
