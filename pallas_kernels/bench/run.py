"""The whole of `jkv bench`: which cases, and each part's rows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jkv.registry import parse
from pallas_kernels.bench import baselines, correctness, decode, write
from pallas_kernels.bench.cases import CENTRE, BenchCase, product, star
from pallas_kernels.bench.result import add_ratios, decode_row, document, reason
from pallas_kernels.bench.timing import copy_bandwidth, matmul_rate

Step = Callable[..., None]
REFERENCES = ("bf16", "fp8")
SCHEMES = (
    *REFERENCES,
    "rtn:bits=4",
    "turboquant:bits=4",
    "ultra-tq:scale=block,v=same",
    "ultraquant",
    "rtn:bits=2",
    "kivi:bits=2",
    "flagrot-kivi:bits=2,mode=group",
    "flagrot-auto:bits=2,mode=key",
)
FEW = (*REFERENCES, "turboquant:bits=4", "ultraquant", "flagrot-kivi:bits=2,mode=group", "flagrot-auto:bits=2,mode=key")
SMALL_HEAD_DIM = 64  # of the check without a GPU


def has_gpu() -> bool:
    """Whether jax computes on a GPU here."""
    return jax.default_backend() == "gpu"


def specs_of(given: Sequence[str] | None) -> tuple[str, ...]:
    """Canonical specs to measure: those given, after the references, or one of every kind of layout."""
    specs = (*REFERENCES, *given) if given else SCHEMES
    return tuple(dict.fromkeys(parse(spec).spec for spec in specs))


def cases_of(
    specs: Sequence[str],
    contexts: Sequence[int] | None,
    batches: Sequence[int] | None,
    heads: Sequence[tuple[int, int]] | None,
    head_dim: int,
    block_tokens: int,
) -> list[BenchCase]:
    """Every combination of what is given; where nothing is, each of the three is swept about the centre.

    Raises:
      JkvError: for a shape or a scheme that the kernels do not take.
    """
    if contexts is None and batches is None and heads is None:
        return [case for spec in specs for case in star(spec, head_dim, block_tokens)]
    batch, context, pair, _ = CENTRE
    sweeps = (contexts or (context,), batches or (batch,), heads or (pair,))
    return [case for spec in specs for case in product(spec, *sweeps, head_dim, block_tokens)]


def measure(
    cases: Sequence[BenchCase], parts: Sequence[str], others: Sequence[str], command: str, step: Step
) -> dict[str, Any]:
    """Run ``parts`` on this GPU; the JSON document. The roofs are measured first, in the same run."""
    specs, head_dim = tuple(dict.fromkeys(case.scheme for case in cases)), cases[0].head_dim
    found: dict[str, Any] = {"skipped": []}
    if "decode" in parts or "write" in parts:
        step(0, 2, "roofs")
        found["copy_bandwidth"] = copy_bandwidth()
        found["matmul_rate"] = matmul_rate()
    if "decode" in parts:
        found["rows"] = _decode_rows(cases, others, found, step)
    if "write" in parts:
        found["write"] = _write_rows(specs, head_dim, found, step)
    if "correctness" in parts:
        found["correctness"] = check(specs, head_dim, interpret=False, step=step)
    return document(command, **found)


def check(specs: Sequence[str], head_dim: int, *, interpret: bool, step: Step) -> list[dict[str, Any]]:
    """The correctness rows of all schemes. Interpret mode is bound by compiling, which two threads do side by side."""
    one = functools.partial(correctness.check, head_dim=head_dim, interpret=interpret)
    rows: list[dict[str, Any]] = []
    step(0, len(specs), "checking")
    with ThreadPoolExecutor(2 if interpret else 1) as pool:
        for index, found in enumerate(pool.map(one, specs)):
            step(index + 1, len(specs), f"checked {specs[index]}")
            rows += found
    return rows


def _decode_rows(
    cases: Sequence[BenchCase], others: Sequence[str], found: dict[str, Any], step: Step
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    chosen = [baseline for baseline in baselines.BASELINES if baseline.module in others]
    shapes = list(dict.fromkeys(case.shape for case in cases))
    total = len(cases) + len(chosen) * len(shapes)
    compiled = itertools.count(1)

    def done(case: BenchCase) -> None:
        step(next(compiled), total, f"{case.scheme}, {case.batch} x {case.context}")

    for measured in decode.measure(cases, done):
        case = measured.case
        if measured.timing is None:
            assert measured.error is not None
            found["skipped"].append(_skipped(case.scheme, "", case.shape, reason(measured.error)))
        else:
            rows.append(decode_row(case, measured.kernel, measured.timing, found["copy_bandwidth"]))
    for index, baseline in enumerate(chosen):
        missing = baselines.missing(baseline)
        if missing:
            found["skipped"].append(_skipped(baseline.scheme, baseline.name, None, missing))
            continue
        for number, shape in enumerate(shapes):
            step(len(cases) + index * len(shapes) + number, total, baseline.name)
            case = BenchCase(baseline.scheme, *shape)
            outcome = baselines.measure(baseline, case)
            if outcome.timing is None:
                found["skipped"].append(_skipped(baseline.scheme, baseline.name, shape, outcome.why))
            else:
                rows.append(decode_row(case, baseline.name, outcome.timing, found["copy_bandwidth"]))
    add_ratios(rows)
    return rows


def _skipped(scheme: str, kernel: str, shape: tuple[int, ...] | None, why: str) -> dict[str, Any]:
    return {"scheme": scheme, "kernel": kernel, "shape": shape and list(shape), "why": why}


def _write_rows(specs: Sequence[str], head_dim: int, found: dict[str, Any], step: Step) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    cases = write.cases(specs, CENTRE[2][1], head_dim)
    for index, case in enumerate(cases):
        step(index, len(cases), f"writing {case.scheme}, {case.tokens} tokens")
        try:
            rows.append(write.row(case, write.measure(case), found["copy_bandwidth"]))
        except Exception as error:
            shape = (case.tokens, case.num_kv_heads, case.head_dim)
            found["skipped"].append(_skipped(case.scheme, "write", shape, reason(error)))
    add_ratios(rows, write.SHAPE)
    return rows
