"""One vLLM engine in this process, measured while it decodes: a job as JSON on stdin, rows as JSON on stdout.

Nothing is prefilled: the cache is filled with valid pages (:mod:`vllm_memory`), and requests come with all tokens of
their prompt but the last one counted as computed, as after a prefill elsewhere. All of them decode in every step. Time
per output token is that of one whole period of 32 steps, in which every row fills a page, divided by 32.

Lines that begin with ROW are results, READY means that imports are done and a job may come.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import vllm_memory
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from torch_bridge.vllm.plugin import register

register()  # where the package is not installed, nobody has called it

_WARM, _PERIOD = 3, 32  # steps before those that count, and those
_STEPS = _WARM + _PERIOD + 1
Job = dict[str, Any]


class Engine:
    """An engine with a full cache."""

    def __init__(self, job: Job):
        self.job = job
        start = time.perf_counter()
        self.llm = LLM(**job["llm"])
        self.config = self.llm.llm_engine.vllm_config
        cache = self.config.cache_config
        self.block, self.blocks = cache.block_size, cache.num_gpu_blocks
        self.layers = vllm_memory.layers_of(self.config)
        started = time.perf_counter()
        vllm_memory.fill(self.layers, self.config.model_config.dtype)
        tensors = [layer.kv_cache for layer in self.layers]
        waiting = [getattr(getattr(layer.impl, "served", None), "waiting", None) for layer in self.layers]
        self.facts = {
            "cache_tokens": (self.blocks - 1) * self.block,  # block 0 is nobody's
            "cache_bytes": sum(x.nbytes for x in tensors),
            "bytes_per_token": sum(x.nbytes for x in tensors) / (self.blocks * self.block),
            "waiting_bytes": sum(x.nbytes for x in waiting if x is not None),
            "block_tokens": self.block,
            "max_num_seqs": self.config.scheduler_config.max_num_seqs,
        }
        self.started, self.filled = started - start, time.perf_counter() - started

    def most(self, context: int) -> int:
        """Sequences that fit, with room to grow."""
        rows = (self.blocks - 1) // -(-(context + self.job["room"]) // self.block)
        return min(rows, self.facts["max_num_seqs"])

    def measure(self, context: int, batch: int) -> dict[str, float]:
        """Decode ``batch`` sequences of ``context`` tokens."""
        engine, found = self.llm.llm_engine, []
        scheduler = engine.engine_core.engine_core.scheduler
        options = {"temperature": 0.0, "max_tokens": _STEPS, "min_tokens": _STEPS, "ignore_eos": True}
        sampling = SamplingParams(**options, detokenize=False, output_kind=RequestOutputKind.DELTA)
        ids = [7] * (context + 1)
        for number in range(batch):
            engine.add_request(f"{context}-{batch}-{number}-{time.perf_counter()}", {"prompt_token_ids": ids}, sampling)
        waiting = list(scheduler.waiting)
        assert len(waiting) == batch
        for request in waiting:
            request.num_computed_tokens = context
        gc.collect()
        gc.disable()
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if outputs:
                assert len(outputs) == batch, f"{len(outputs)} of {batch} rows decoded in a step"
                found.append(time.perf_counter())
        gc.enable()
        assert len(found) == _STEPS, f"{len(found)} steps"
        took = [after - before for before, after in zip(found[_WARM - 1 :], found[_WARM:], strict=False)][:_PERIOD]
        mean = sum(took) / len(took)
        return {
            "ms_per_output_token": round(mean * 1e3, 3),
            "ms_median": round(statistics.median(took) * 1e3, 3),
            "output_tokens_per_s": round(batch / mean, 1),
        }

    def checks(self) -> dict[str, int]:
        """What must be 0 in the end: values that were stored as zero."""
        served = [getattr(layer.impl, "served", None) for layer in self.layers]
        return {"nonfinite": sum(int(x.nonfinite) for x in served if x is not None)}

    def use_graphs(self, wanted: bool) -> None:
        """Replay CUDA graphs or launch every kernel; the model is the same code."""
        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        manager, dispatcher = (getattr(runner, f"cudagraph_{name}", None) for name in ("manager", "dispatcher"))
        if manager is not None:
            assert not wanted or manager.graphs, "nothing was captured"
            manager._graphs_captured = wanted
        elif dispatcher is not None:  # the older model runner
            dispatcher.keys_initialized = wanted


def main() -> None:
    print("READY", flush=True)
    line = sys.stdin.readline()
    if not line.strip():
        return
    job: Job = json.loads(line)
    engine = Engine(job)
    print(
        "INFO " + json.dumps({**engine.facts, "start_s": round(engine.started, 1), "fill_s": round(engine.filled, 1)}),
        flush=True,
    )
    # The first steps after a start are slower: nothing of them counts.
    engine.measure(min(job["contexts"]), 1)
    for mode in job["modes"]:
        engine.use_graphs(mode == "graph")
        for context in job["contexts"]:
            most = engine.most(context)
            batches = sorted({min(b, most) for b in job["batches"][mode]} | {most}, reverse=True) if most else []
            for batch in batches:
                row = {"mode": mode, "context": context, "batch": batch, "full": batch == most}
                print("ROW " + json.dumps(row | engine.measure(context, batch)), flush=True)
    print("INFO " + json.dumps(engine.checks()), flush=True)
    if torch.cuda.is_available():
        print("INFO " + json.dumps({"peak_bytes": torch.cuda.max_memory_allocated()}), flush=True)
    os._exit(0)  # engines take seconds to take themselves apart


if __name__ == "__main__":
    main()
