"""One vLLM engine in this process, measured: a job as JSON on stdin, rows as JSON on stdout.

Decoding: nothing is prefilled. The cache is filled with valid pages (:mod:`vllm_memory`), and requests come with all
tokens of their prompt but the last one counted as computed, as after a prefill elsewhere. All of them decode in every
step. Time per output token is that of one whole period of 32 steps, in which every row fills a page, divided by 32.

Prompts: the same, with as many tokens left to compute as the job says; the first of several runs does not count.

Lines that begin with ROW are results, READY means that imports are done and a job may come.
"""

from __future__ import annotations

import gc
import json
import os
import random
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
_TIMES = 3  # that a prompt's time is the median of
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
        self.random, self.words = random.Random(0), self.config.model_config.get_vocab_size()
        self.started, self.filled = started - start, time.perf_counter() - started

    def most(self, context: int) -> int:
        """Sequences that fit, with room to grow."""
        rows = (self.blocks - 1) // -(-(context + self.job["room"]) // self.block)
        return min(rows, self.facts["max_num_seqs"])

    def measure(self, context: int, batch: int) -> dict[str, float]:
        """Decode ``batch`` sequences of ``context`` tokens."""
        engine, found = self.llm.llm_engine, []
        self._ask(context, [[7]] * batch, _STEPS)
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

    def prompts(self, cached: int, new: int, requests: int) -> dict[str, float]:
        """Compute ``new`` tokens of every request after ``cached`` ones, until each has its first token."""
        engine, took = self.llm.llm_engine, []
        for _ in range(1 + _TIMES):
            self._ask(cached, [[self.random.randrange(2, self.words) for _ in range(new)] for _ in range(requests)], 1)
            gc.collect()
            start, first = time.perf_counter(), 0
            while engine.has_unfinished_requests():
                first += len(engine.step())
            took.append(time.perf_counter() - start)
            assert first == requests, f"{first} of {requests} requests have a token"
        seconds = statistics.median(took[1:])
        return {"ms": round(seconds * 1e3, 2), "new_tokens_per_s": round(new * requests / seconds, 1)}

    def _ask(self, cached: int, prompts: list[list[int]], tokens: int) -> None:
        """Requests with the tokens that are left of their prompts, for so many more."""
        engine = self.llm.llm_engine
        options = {"temperature": 0.0, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
        sampling = SamplingParams(**options, detokenize=False, output_kind=RequestOutputKind.DELTA)
        for number, ids in enumerate(prompts):
            name = f"{cached}-{len(prompts)}-{number}-{time.perf_counter()}"
            engine.add_request(name, {"prompt_token_ids": [7] * cached + ids}, sampling)
        waiting = list(engine.engine_core.engine_core.scheduler.waiting)
        assert len(waiting) == len(prompts)
        for request in waiting:
            request.num_computed_tokens = cached

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
    if job["modes"]:  # the first steps after a start are slower: nothing of them counts
        engine.measure(min(job["contexts"]), 1)
    for mode in job["modes"]:
        engine.use_graphs(mode == "graph")
        for context in job["contexts"]:
            most = engine.most(context)
            batches = sorted({min(b, most) for b in job["batches"][mode]} | {most}, reverse=True) if most else []
            for batch in batches:
                row = {"mode": mode, "context": context, "batch": batch, "full": batch == most}
                print("ROW " + json.dumps(row | engine.measure(context, batch)), flush=True)
    for prompt in job.get("prompts", ()):
        print("ROW " + json.dumps(prompt | engine.prompts(**prompt)), flush=True)
    print("INFO " + json.dumps(engine.checks()), flush=True)
    if torch.cuda.is_available():
        print("INFO " + json.dumps({"peak_bytes": torch.cuda.max_memory_allocated()}), flush=True)
    os._exit(0)  # engines take seconds to take themselves apart


if __name__ == "__main__":
    main()
