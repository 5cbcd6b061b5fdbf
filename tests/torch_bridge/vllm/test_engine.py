"""vLLM's own engine on a CPU, with the demo model: who serves, how much fits, what comes out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from jkv.page import layout
from jkv.plan import plan_layers
from jkv.registry import parse
from tests import cases
from tests.torch_bridge.vllm import engines
from tests.torch_bridge.vllm.engines import BLOCK, CACHE, HEAD_DIM, KV_HEADS, LAYERS, greedy, needs_vllm, options, words

pytestmark = [needs_vllm, pytest.mark.demo, pytest.mark.slow, pytest.mark.timeout(1200)]
NEW = 40  # tokens of a continuation: more than a page


def tokens_that_fit(spec: str, heads: int = KV_HEADS) -> int:
    """Of all layers together, in whole blocks."""
    layers = plan_layers(parse(spec), LAYERS).layers
    token = sum(layout(layer, HEAD_DIM).nbytes for layer in layers) * heads // 32
    return CACHE // (token * BLOCK) * BLOCK


@pytest.mark.parametrize(
    "spec",
    [
        "kivi:bits=2",
        "ultraquant:tail=0",
        "rtn:bits=4,boundary=2",
        "fp8;2=rtn:bits=4;-1=bf16",
    ],
)
def test_every_attention_call_is_served_and_the_cache_holds_what_it_should(spec):
    prompts = [words(count, seed) for seed, count in enumerate((5, 32, 70, 150))]
    found = engines.run(options(spec), greedy(prompts, NEW))
    assert found["tokens"] == tokens_that_fit(spec)
    layers = list(found["layers"].values())
    assert len(layers) == LAYERS
    plan = plan_layers(parse(spec), LAYERS).layers
    for layer, scheme in zip(layers, plan, strict=True):
        assert layer["spec"].split(",boundary")[0] == scheme.spec.split(",boundary")[0].split(";")[0]
        assert layer["shape"][1:] == [KV_HEADS, BLOCK, layout(scheme, HEAD_DIM).nbytes // 32]
        # Every step of the engine, whatever rows it had, wrote and read in every layer.
        assert layer["writes"] == layer["reads"] == layers[0]["reads"] >= NEW
        assert layer["nonfinite"] == 0
    assert all(len(out["ids"][0]) == NEW for out in found["steps"][0])


def test_what_is_not_asked_for_stays_as_it_is():
    found = engines.run(options(None), greedy([words(20)], 4))
    assert {layer["impl"] for layer in found["layers"].values()} == {"CPUAttentionBackendImpl"}
    assert found["tokens"] == CACHE // (4 * 2 * HEAD_DIM * KV_HEADS * LAYERS * BLOCK) * BLOCK


def test_results_hold_with_prefix_caching_chunks_batches_and_preemption(tmp_path):
    """The same continuation from a cold cache, a warm one, in small chunks, among others, with too little room."""
    spec, one = "rtn:bits=4", words(200)
    others = [words(60 + 30 * seed, seed) for seed in range(1, 6)]
    cold, warm, batch = engines.run(options(spec), greedy([one], NEW), greedy([one], NEW), greedy([*others, one], NEW))[
        "steps"
    ]
    assert cold[0]["cached"] == 0 and warm[0]["cached"] == 200 // BLOCK * BLOCK
    chunked = engines.run(options(spec, max_num_batched_tokens=40), greedy([one], NEW))["steps"][0]
    # Room for two of these requests at a time: others are preempted, blocks evicted and filled again.
    tight = options(spec, num_gpu_blocks_override=10, block_size=32, enable_prefix_caching=True, max_model_len=288)
    evicted = engines.run(tight, greedy([one, *others], NEW), greedy([one], NEW))["steps"]
    for name, out in {
        "warm": warm[0],
        "batch": batch[-1],
        "chunked": chunked[0],
        "tight": evicted[0][0],
        "after eviction": evicted[1][0],
    }.items():
        assert engines.distance(cold[0], out) < 0.06, name


def test_ngram_speculation_gives_the_same_distributions():
    one = words(100)[:50] * 3
    plain = engines.run(options("kivi:bits=4"), greedy([one], NEW))["steps"][0]
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    found = engines.run(options("kivi:bits=4", speculative_config=drafts), greedy([one], NEW))
    assert engines.distance(plain[0], found["steps"][0][0]) < 0.06
    (reads,) = {layer["reads"] for layer in found["layers"].values()}
    assert reads < NEW  # drafts were accepted


def random_model(folder: Path, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two layers of random weights with two KV heads of 64: options of an engine, and a step of one prompt."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(
        **sizes, vocab_size=256, num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, **options
    )
    model = MistralForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    step = greedy([torch.randint(0, 256, (150,)).tolist()], NEW)
    step["sampling"]["detokenize"] = False
    return {"model": str(folder), "skip_tokenizer_init": True, "max_num_batched_tokens": 64}, step


def test_a_sliding_window_is_the_models(tmp_path):
    """Random weights: with every token in BF16, or in float8, the distributions are those of vLLM's own attention."""
    given, step = random_model(tmp_path, sliding_window=40)
    exact = engines.run(options(None, **given), step)["steps"][0][0]
    for scheme, far in (("bf16", 1e-3), ("fp8", 0.02), ("fp8:tail=0", 0.02)):
        found = engines.run(options(scheme, **given), step)
        assert engines.distance(exact, found["steps"][0][0]) < far, scheme
        assert all(layer["reads"] > NEW for layer in found["layers"].values())


def test_ranks_share_heads_and_calibration(tmp_path):
    """Three ranks with a KV head each: the same answers, three times the room."""
    spec, one = "rtn:bits=4,rotation=head,center=on", words(90)
    made = cases.calibration(HEAD_DIM, KV_HEADS, LAYERS)
    config = json.loads((engines.folder() / "config.json").read_text())
    meta = made.meta | {"fingerprint": config["jkv_fingerprint"]}
    path = dataclasses.replace(made, meta=meta).save(tmp_path / "calib.safetensors")
    alone = engines.run(options(spec, path), greedy([one], NEW))
    ranks = engines.run(options(spec, path, tensor_parallel_size=3), greedy([one], NEW))
    assert engines.distance(alone["steps"][0][0], ranks["steps"][0][0]) < 0.02
    assert ranks["tokens"] == tokens_that_fit(spec, heads=1)
    assert len(ranks["ranks"]) == 3
    for rank in ranks["ranks"]:
        assert rank["served"] == rank["layers"] == LAYERS and rank["writes"] == rank["reads"] == [NEW]


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")
def test_two_ranks_answer_as_one(tmp_path):
    """On two GPUs where there are some, with launched kernels and CUDA graphs."""
    given, step = random_model(tmp_path / "model", sliding_window=None)
    if torch.cuda.is_available():
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1]}
        given |= {"dtype": "bfloat16", "enforce_eager": False, "compilation_config": graphs}
        given |= {"kv_cache_memory_bytes": CACHE}
    path = cases.calibration(64, 2, 2).save(tmp_path / "calib.safetensors")
    spec = "flagrot-auto:bits=4,mode=fixed"
    alone = engines.run(options(spec, path, **given), step)
    ranks = engines.run(options(spec, path, **given, tensor_parallel_size=2), step)
    assert engines.distance(alone["steps"][0][0], ranks["steps"][0][0]) < 0.02
    assert len(ranks["ranks"]) == 2 and all(rank["served"] == rank["layers"] == 2 for rank in ranks["ranks"])
    assert abs(ranks["tokens"] - 2 * alone["tokens"]) <= 2 * BLOCK  # whole blocks


def test_wrong_use_is_refused_before_the_model_is_loaded(tmp_path):
    calibration = cases.calibration(HEAD_DIM, KV_HEADS, LAYERS).save(tmp_path / "other.safetensors")
    small = cases.calibration(HEAD_DIM, 2, 4).save(tmp_path / "small.safetensors")
    found = engines.refusals(
        options("kivvi:bits=2"),
        options("kivi:bits=2", calibration),
        options("kivi:bits=2", small),
        options("flagrot-auto:bits=2,mode=key"),
        options("kivi:bits=2", block_size=48),
        options("kivi:bits=2,recent=64"),
        options("kivi:bits=2,sink=4"),
        options("kivi:bits=2", kv_cache_dtype="fp8"),
        options(None, additional_config={"jkv": {"schema": "kivi:bits=2"}}),
    )
    wanted = (
        "scheme 'kivvi' is unknown; nearest is 'kivi'",
        "was made on a random model",
        "this calibration is for a random model with (layers, KV heads, head_dim) = (4, 2, 64)",
        "needs a calibration",
        "block_size=48 is not allowed with jkv; it must be a multiple of 32",
        "recent=64 in 'kivi:bits=2,recent=64' cannot be served by vLLM",
        "sink=4 in 'kivi:bits=2,sink=4' cannot be served by vLLM",
        "kv_cache_dtype='fp8' is not allowed with jkv",
        "must be an object with a scheme",
    )
    for message, part in zip(found, wanted, strict=True):
        assert part in message and "\n" not in message
