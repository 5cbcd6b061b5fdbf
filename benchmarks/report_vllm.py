"""The tables and the picture of docs/vllm.md, from what benchmarks/vllm_{decode,prefill,kernels,quality}.py found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
LIMIT_MS = 60.0  # of a token, beyond which a batch does not count
NAMES = {
    "bf16": "BF16, vLLM's FlashAttention 3",
    "fp8-fa3": "FP8, vLLM's FlashAttention 3",
    "fp8": "FP8, vLLM's Triton backend",
    "ultraquant": "`ultraquant`",
    "flagrot-kivi": "`flagrot-kivi:bits=2,mode=group`",
    "flagrot-auto": "`flagrot-auto:bits=2,mode=key`",
}
Row = dict[str, Any]


def _load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _source(found: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"`{found['command']}` on {found['device']}, {versions}, {found['date']}"


def _lines(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def best(rows: list[Row], engine: str, context: int, mode: str) -> Row:
    """The row of most tokens a second within the limit."""
    found = [
        row
        for row in rows
        if (row["engine"], row["context"], row["mode"]) == (engine, context, mode)
        and row["ms_per_output_token"] <= LIMIT_MS
    ]
    return max(found, key=lambda row: row["output_tokens_per_s"])


def decode_table() -> str:
    """Capacity, and the best throughput within the limit by context."""
    found = _load("vllm-decode")
    rows, engines = found["rows"], found["engines"]
    contexts = sorted({row["context"] for row in rows})
    head = ["cache", "bytes a token", "tokens of cache", "times BF16"]
    for context in contexts:
        head += [f"{context // 1024}k: batch", "ms a token", "tokens/s", "times BF16"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, title in NAMES.items():
        made, base = engines[name], engines["bf16"]
        cells = [title, f"{made['bytes_per_token']:,.0f}", f"{made['cache_tokens']:,}"]
        cells.append(f"{made['cache_tokens'] / base['cache_tokens']:.2f}")
        for context in contexts:
            row, first = (best(rows, engine, context, "graph") for engine in (name, "bf16"))
            ratio = row["output_tokens_per_s"] / first["output_tokens_per_s"]
            tokens, full = row["output_tokens_per_s"], " (full)" if row["full"] else ""
            cells += [f"{row['batch']}{full}", f"{row['ms_per_output_token']:.1f}", f"{tokens:,.0f}", f"{ratio:.2f}"]
        lines.append(cells)
    return f"{_lines(lines)}\n\nMeasured with {_source(found)}; one engine after the other."


def eager_table() -> str:
    """The same engines without CUDA graphs: milliseconds a token at batches that both modes have."""
    time = {
        (row["engine"], row["context"], row["batch"], row["full"], row["mode"]): row["ms_per_output_token"]
        for row in _load("vllm-decode")["rows"]
    }
    shapes = [(context, batch) for context in (8192, 32768) for batch in (1, 16, None)]
    head = ["ms a token: graph / eager", *(f"{c // 1024}k, batch {b or 'full'}" for c, b in shapes)]
    lines = [head, ["---", *["---:"] * len(shapes)]]
    for name, title in NAMES.items():
        cells = [title]
        for context, batch in shapes:
            size = batch or next(b for e, c, b, full, _ in time if (e, c, full) == (name, context, True))
            pair = (time[name, context, size, batch is None, mode] for mode in ("graph", "eager"))
            cells.append(" / ".join(f"{ms:.1f}" for ms in pair))
        lines.append(cells)
    return _lines(lines)


def demo_table() -> str:
    """The demo model with its weights: milliseconds a token at every batch, and tokens a second at most."""
    found = _load("vllm-demo")
    rows = [row for row in found["rows"] if row["mode"] == "graph"]
    batches = sorted({row["batch"] for row in rows if not row["full"]})
    head = [
        "cache",
        "tokens of cache",
        *(f"batch {batch}" for batch in batches),
        "largest",
        "ms",
        "tokens/s",
        "times BF16",
    ]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    base = max(row["output_tokens_per_s"] for row in rows if row["engine"] == "bf16")
    for name, made in found["engines"].items():
        own = {row["batch"]: row for row in rows if row["engine"] == name}
        last = own[max(own)]
        cells = [NAMES[name], f"{made['cache_tokens']:,}"]
        cells += [f"{own[batch]['ms_per_output_token']:.2f}" for batch in batches]
        cells += [f"{last['batch']}", f"{last['ms_per_output_token']:.1f}", f"{last['output_tokens_per_s']:,.0f}"]
        lines.append([*cells, f"{last['output_tokens_per_s'] / base:.2f}"])
    return f"{_lines(lines)}\n\nMeasured with {_source(found)}."


def small_table() -> str:
    """The demo model's shape at small batches, in a run of its own: milliseconds a token."""
    found = _load("vllm-demo-small")
    batches = sorted({row["batch"] for row in found["rows"]})
    lines = [["ms a token", *(f"batch {batch}" for batch in batches)], ["---", *["---:"] * len(batches)]]
    for name in sorted(found["engines"], key=list(NAMES).index):
        own = {row["batch"]: row for row in found["rows"] if row["engine"] == name}
        lines.append([NAMES[name], *(f"{own[batch]['ms_per_output_token']:.2f}" for batch in batches)])
    return f"{_lines(lines)}\n\nMeasured with {_source(found)}."


def prefill_table() -> str:
    """Milliseconds until all requests have their first token, and beside it how many times BF16's speed that is."""
    found = _load("vllm-prefill")
    ms = {(row["engine"], row["cached"], row["new"], row["requests"]): row["ms"] for row in found["rows"]}
    engines = sorted(found["engines"], key=list(NAMES).index)
    lines = [
        ["cached tokens", "new tokens", "requests", *(NAMES[name] for name in engines)],
        ["---:"] * (3 + len(engines)),
    ]
    for shape in dict.fromkeys(key[1:] for key in ms):
        cells = [f"{number:,}" for number in shape]
        for name in engines:
            ratio = "" if name == "bf16" else f" ({ms['bf16', *shape] / ms[name, *shape]:.2f}x)"
            cells.append(f"{ms[name, *shape]:,.0f} ms{ratio}")
        lines.append(cells)
    return f"{_lines(lines)}\n\nMeasured with {_source(found)}."


def quality_table() -> str:
    """Tokens of 1 GiB of cache and KL of one engine on a CPU and one on a GPU, beside ``jkv compare``."""
    cpu, gpu = _load("vllm-quality"), _load("vllm-quality-gpu")
    there = {row["scheme"]: row for row in gpu["rows"]}
    base = next(row["cache_tokens"] for row in cpu["rows"] if row["scheme"] == "bf16")
    lines = [
        ["scheme", "tokens of cache", "times BF16", "KL x 1000, CPU", "KL x 1000, H200", "KL x 1000, `jkv compare`"],
        ["---", *["---:"] * 5],
    ]

    def kl(row: Row | None, prefix: str = "") -> str:
        return "" if row is None else f"{row[prefix + 'kl_x1000']:.1f} ± {row[prefix + 'kl_se']:.1f}"

    for row in cpu["rows"]:
        cells = [f"`{row['scheme']}`", f"{row['cache_tokens']:,}", f"{row['cache_tokens'] / base:.2f}"]
        lines.append([*cells, kl(row), kl(there.get(row["scheme"])), kl(row, "compare_")])
    return f"{_lines(lines)}\n\nMeasured with {_source(cpu)} and {_source(gpu)}."


def kernel_table() -> str:
    """Decode kernels at op level: milliseconds by context, and how much faster ours are."""
    found = _load("vllm-kernels")
    rows = {(row["kernel"], row["context"]): row["ms"] for row in found["rows"] if "ms" in row}
    contexts = sorted({context for _, context in rows})
    kernels = list(dict.fromkeys(kernel for kernel, _ in rows))
    lines = [["kernel, ms", *(f"{context // 1024}k" for context in contexts)], ["---", *["---:"] * len(contexts)]]
    for kernel in kernels:
        title = kernel if kernel.startswith("vllm") else f"`{kernel}`"
        lines.append([title, *(f"{rows[kernel, context]:.3f}" for context in contexts)])
    pairs = (
        ("turboquant:bits=4", ["vllm turboquant_4bit_nc"]),
        ("rtn:bits=4", ["vllm int4_per_token_head", "vllm int4_per_token_head, split"]),
    )
    for own, theirs in pairs:
        cells = [f"`{own}`: times faster than {theirs[0]}"]
        cells += [f"{min(rows[other, c] for other in theirs) / rows[own, c]:.1f}" for c in contexts]
        lines.append(cells)
    heads = found["heads"]
    shape = f"batch 32, {heads['query']}/{heads['kv']} heads, head_dim {heads['head_dim']}"
    return f"{_lines(lines)}\n\nMeasured with {_source(found)}; {shape}."


def plot(path: Path, context: int = 32768) -> None:
    """Throughput against time a token at one context, a line an engine."""
    from matplotlib.figure import Figure

    rows = _load("vllm-decode")["rows"]
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.add_subplot()
    styles = {"bf16": ("0.35", "o-"), "fp8-fa3": ("0.55", "s-"), "fp8": ("0.7", "^-")}
    colours = {"ultraquant": "tab:blue", "flagrot-kivi": "tab:green", "flagrot-auto": "tab:red"}
    for name, title in NAMES.items():
        own = [row for row in rows if (row["engine"], row["context"], row["mode"]) == (name, context, "graph")]
        own.sort(key=lambda row: row["batch"])
        colour, style = styles.get(name, (colours.get(name, "black"), "o-"))
        axes.plot(
            [row["ms_per_output_token"] for row in own], [row["output_tokens_per_s"] for row in own], style,
            color=colour, label=title.strip("`").split(":")[0], markersize=4,
        )  # fmt: skip
        axes.annotate(
            f"{own[-1]['batch']}", (own[-1]["ms_per_output_token"], own[-1]["output_tokens_per_s"]), fontsize=8,
            textcoords="offset points", xytext=(4, 4), color=colour,
        )  # fmt: skip
    axes.axvline(LIMIT_MS, color="0.8", linestyle=":")
    axes.set(xlabel="ms per output token", ylabel="output tokens per second", xlim=(0, None), ylim=(0, None))
    axes.set_title(f"Qwen3-8B shape on one H200, {context // 1024}k tokens a request, up to full memory", fontsize=10)
    axes.legend(fontsize=8, loc="upper right", bbox_to_anchor=(1.0, 0.75))
    figure.savefig(path, dpi=130)
