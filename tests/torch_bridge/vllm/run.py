"""One engine in a process of its own: ``python -m tests.torch_bridge.vllm.run`` with a job as JSON on stdin.

A job is ``{"llm": options of LLM, "steps": [{"prompts": lists of ids, "sampling": options}]}``; with ``"logits": FILE``
a step leaves the logits of its prompts' tokens there. Behind RESULT comes JSON: the size of the cache in tokens, calls
of every layer and of every rank, and for every step the tokens and logprobs.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

RESULT = "RESULT "  # the line that is meant: engines print others
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "JAX_PLATFORMS": "cpu",
}


def main(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(**job["llm"], worker_extension_cls="tests.torch_bridge.vllm.counts.Counts")
    config = llm.llm_engine.vllm_config
    found: dict[str, Any] = {"tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size}
    found["steps"] = []
    for step in job.get("steps", []):
        prompts = [{"prompt_token_ids": ids} for ids in step["prompts"]]
        with _collected(llm, step.get("logits")):
            outs = llm.generate(prompts, SamplingParams(**step["sampling"]), use_tqdm=False)
        found["steps"].append([_output(out) for out in outs])
    found["ranks"] = llm.collective_rpc("jkv_counts")
    found["layers"] = {name: _layer(layer) for name, layer in config.compilation_config.static_forward_context.items()}
    return found


@contextlib.contextmanager
def _collected(llm: Any, path: str | None) -> Iterator[None]:
    """Keep the logits of all tokens of prompts: with ``prompt_logprobs``, those of more than one row at a time."""
    if path is None:
        yield
        return
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    original, found = model.compute_logits, []

    def compute_logits(hidden: Any, *rest: Any) -> Any:
        logits = original(hidden, *rest)
        if len(hidden) > 1:
            found.append(logits.float().numpy().copy())
        return logits

    model.compute_logits = compute_logits
    yield
    del model.compute_logits
    np.save(path, np.concatenate(found))


def _output(out: Any) -> dict[str, Any]:
    prompt = out.prompt_logprobs
    return {
        "cached": out.num_cached_tokens,
        "ids": [list(made.token_ids) for made in out.outputs],
        "logprobs": [[_of(entry) for entry in made.logprobs or []] for made in out.outputs],
        "prompt": None if prompt is None else [None if entry is None else _of(entry) for entry in prompt],
    }


def _of(entry: Any) -> dict[str, float]:
    return {str(token): value.logprob for token, value in entry.items()}


def _layer(layer: Any) -> dict[str, Any]:
    served = getattr(getattr(layer, "impl", None), "served", None)
    if served is None:
        return {"impl": type(getattr(layer, "impl", layer)).__name__}
    return {
        "spec": served.scheme.description.spec,
        "writes": served.writes,
        "reads": served.reads,
        "nonfinite": int(served.nonfinite),
        "shape": list(layer.kv_cache.shape),
    }


if __name__ == "__main__":
    print(RESULT + json.dumps(main(json.load(sys.stdin))), flush=True)
