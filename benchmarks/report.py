"""Write the measured tables of README.md and docs/, and draw docs/roofline.png and docs/vllm-decode.png.

Everything comes from the committed results.

    python benchmarks/report.py [--check]

Each table stands between ``<!-- table:NAME -->`` and ``<!-- table:end -->``. ``--check`` changes nothing and exits with
1 where a table differs from the results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import report_vllm

from jkv.evaluate.table import markdown
from pallas_kernels.bench.markdown import document
from pallas_kernels.bench.roofline import plot

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict[str, Any]:
    """One committed result."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def machine(versions: dict[str, str]) -> str:
    """The device and versions behind a table."""
    return f"{versions['device']}, jax {versions['jax']}, Python {versions['python']}"


def compare_table() -> str:
    found = load("compare")
    return f"{markdown(found).strip()}\n\nMeasured with `{found['command']}` on {found['machine']}, {found['date']}."


def bars_table() -> str:
    found = load("acceptance")
    lines = ["| what | measured | bar | |", "| --- | ---: | ---: | --- |"]
    for bar in found["bars"]:
        lines.append(
            f"| {bar['name']} | {bar['measured']:.3f} | {bar['bar']:g} | {'holds' if bar['holds'] else 'MISSED'} |"
        )
    return "\n".join([*lines, "", _source(found, found["demo"])])


def rows_table() -> str:
    found = load("acceptance")
    base = {row["scheme"]: row for row in found["demo"]["rows"]}
    hard = {row["scheme"]: row for row in found["key_bias"]["rows"]}
    lines = ["| scheme | bits | KL x 1000 | top-1 | with key bias |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, row in base.items():
        biased = f"{hard[name]['kl_x1000']:.1f}" if name in hard else ""
        kl = f"{row['kl_x1000']:.2f} ± {row['kl_se']:.2f}"
        lines.append(f"| `{name}` | {row['bits_per_value']:.2f} | {kl} | {row['top1_agreement']:.3f} | {biased} |")
    for name in hard.keys() - base.keys():
        row = hard[name]
        lines.append(f"| `{name}` | {row['bits_per_value']:.2f} | | | {row['kl_x1000']:.1f} |")
    return "\n".join([*lines, "", _source(found, found["demo"])])


def ablation_table() -> str:
    found = load("ablation")
    lines = [
        "| measure | mode | bits | KL x 1000 | to KIVI | paper's KL | to KIVI | |",
        "| --- " * 2 + "| ---: " * 5 + "| --- |",
    ]
    for row in found["table"]:
        paper = [
            f"{row[key]:{form}}" if key in row else ""
            for key, form in (("paper_kl_x1000", ".1f"), ("paper_ratio", ".3f"))
        ]
        cells = [
            row["measure"],
            row["mode"],
            f"{row['bits']:.1f}",
            f"{row['kl_x1000']:.1f}",
            f"{row['ratio']:.3f}",
            *paper,
        ]
        lines.append("| " + " | ".join([*cells, row.get("verdict", "")]) + " |")
    return "\n".join([*lines, "", _source(found, found["demo"])])


BENCHES = ("bench", "bench-context", "bench-batch", "bench-gqa", "bench-batch1", "bench-write")  # one run each


def bench_table() -> str:
    return "\n\n".join(_bench(load(name)) for name in BENCHES)


def _bench(found: dict[str, Any]) -> str:
    copy, compute = found["copy_bandwidth"] / 1e12, found["matmul_rate"] / 1e12
    roofs = f"In the same run: copy {copy:.2f} TB/s, BF16 matmul {compute:.0f} Tflop/s."
    source = f"Measured with `{found['command']}` on {machine(found['versions'] | found)}, {found['date']}."
    return "\n\n".join([document(found), f"{roofs} {source}"])


def _source(found: dict[str, Any], demo: dict[str, Any]) -> str:
    return f"Measured with `{found['command']}` on {machine(demo['versions'])}, {found['date']}."


def overhead_table() -> str:
    found = load("launch-overhead")
    lines = ["| host time | us | operands bound, us |", "| --- | ---: | ---: |"]
    for name, us in found["launches_us"].items():
        lines.append(f"| launch: {name} | {us['checked']:.1f} | {us['bound']:.1f} |")
    lines += [f"| {name} | {us:.1f} | |" for name, us in found["others_us"].items()]
    times = {"host_ms": "`decode`", "parts_ms": "`append` and `attend`", "graph_ms": "in a CUDA graph"}
    lines += [
        "",
        f"| a token through {found['layers']} layers, ms | " + " | ".join(times.values()) + " |",
        "| --- " + "| ---: " * len(times) + "|",
    ]
    for name, took in found["tokens"].items():
        lines.append(f"| `{name}` | " + " | ".join(f"{took[key]:.2f}" for key in times) + " |")
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    source = (
        f"Measured with `{found['command']}` on {found['device']}, {versions}, {found['date']}; batch {found['batch']}"
    )
    return "\n".join([*lines, "", f"{source}, {found['gqa'] * found['num_kv_heads']}/{found['num_kv_heads']} heads."])


def hf_table() -> str:
    found = load("hf-quality")
    lines = [
        "| scheme | KL x 1000 | `jkv compare` | difference | top-1 |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in found["rows"]:
        own, theirs, off = (
            f"{row[name]:{form}} ± {row[error]:.2f}"
            for name, error, form in (
                ("kl_x1000", "kl_se", ".2f"),
                ("compare_kl_x1000", "compare_kl_se", ".2f"),
                ("difference", "difference_se", "+.2f"),
            )
        )
        lines.append(f"| `{row['scheme']}` | {own} | {theirs} | {off} | {row['top1_agreement']:.3f} |")
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    size = f"{found['sequences']} x {found['tokens']} tokens in {found['dtype']}"
    source = f"Measured with `{found['command']}` on {found['device']}, {versions}, {found['date']}; {size}."
    return "\n".join([*lines, "", source])


TABLES = {
    "README.md": {"compare": compare_table},
    "docs/quality.md": {"bars": bars_table, "rows": rows_table, "ablation": ablation_table},
    "docs/performance.md": {"bench": bench_table},
    "docs/torch.md": {"overhead": overhead_table, "hf": hf_table},
    "docs/vllm.md": {
        "decode": report_vllm.decode_table,
        "eager": report_vllm.eager_table,
        "demo-decode": report_vllm.demo_table,
        "demo-small": report_vllm.small_table,
        "prefill": report_vllm.prefill_table,
        "vllm-quality": report_vllm.quality_table,
        "kernels": report_vllm.kernel_table,
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = []
    for name, tables in TABLES.items():
        path = ROOT / name
        text = old = path.read_text()
        for key, make in tables.items():
            pattern = re.compile(rf"(<!-- table:{key} -->\n).*?(<!-- table:end -->)", re.DOTALL)
            if not pattern.search(text):
                raise SystemExit(f"{name} has no table:{key}")
            text = pattern.sub(lambda m, body=make(): f"{m[1]}{body}\n{m[2]}", text)
        if text != old:
            stale.append(name)
            if not args.check:
                path.write_text(text)
    if not args.check:
        plot(load(BENCHES[0]), ROOT / "docs" / "roofline.png")
        report_vllm.plot(ROOT / "docs" / "vllm-decode.png")
    print(f"{'differ from the results' if args.check else 'rewritten'}: {', '.join(stale) or 'none'}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
