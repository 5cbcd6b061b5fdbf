"""JkvCache in transformers: its own text where nothing is quantized, and one result from pages and from dense keys."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from jkv.errors import JkvError
from tests.torch_bridge.models import (
    BF16,
    FAMILIES,
    SPECS,
    assert_near,
    assert_nearly_same_row,
    cache_of,
    calib_of,
    exact,
    forward,
    generate,
    tiny,
    tokens,
)
from torch_bridge.describe import describe_layers

CLOSE = {"rtol": 0, "atol": 1e-3}


@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_text_of_a_bf16_model_is_that_of_its_own_cache(kind):
    """Logits bit for bit: what BF16 stores is what the model made."""
    model, ids = tiny(kind, BF16, "sdpa"), tokens(1, 37)
    assert torch.equal(generate(model, ids, cache_of(model, "bf16")), generate(model, ids, exact(model)))
    caches = cache_of(model, "bf16"), exact(model)
    for chunk in ids.split((30, 1, 1, 5), dim=1):
        assert torch.equal(*(forward(model, chunk, cache) for cache in caches))


@pytest.mark.parametrize("kind", FAMILIES)
def test_attention_over_pages_is_that_over_dequantized_keys(kind):
    """A prompt, single tokens past the end of a page, and a chunk: the same logits, and not those of an exact cache."""
    pages, dense, ids = tiny(kind), tiny(kind, attention="sdpa"), tokens(1, 90)
    for spec in SPECS[:2] if kind != "Llama" else SPECS:
        given = None if kind == "Qwen2" else calib_of(pages)
        if given is None and spec.startswith("flagrot"):
            spec = "turboquant:bits=4"
        caches = [cache_of(model, spec, given) for model in (pages, dense)]
        for chunk in ids.split((40, *(1,) * 30, 20), dim=1):
            got, want = (forward(model, chunk, cache) for model, cache in zip((pages, dense), caches, strict=True))
            assert_near(got, want, 1e-3)
        assert_nearly_same_row(caches[0].store, 0, caches[1].store)
        want = forward(dense, ids, exact(dense))[:, -20:]
        assert (got - want).abs().mean() > 1e-2 * want.std()


@pytest.mark.parametrize("attention", ["jkv", "sdpa", "eager"])
def test_a_float32_model_with_a_bf16_cache(attention):
    """Keys and values lose 16 bits, nothing else: logits move by as much."""
    model, ids = tiny(attention=attention), tokens(2, 50)
    mask = torch.ones_like(ids)
    caches = cache_of(model, "bf16", padding=mask), exact(model)
    for chunk in ids.split((20, *(1,) * 10, 20), dim=1):
        got, want = (forward(model, chunk, cache) for cache in caches)
        assert_near(got, want, 1e-2)


@pytest.mark.parametrize("attention", ["jkv", "sdpa"])
def test_sliding_windows(attention):
    """As transformers' own cache has them, padding on the left included."""
    model, ids = tiny("Mistral", attention=attention, sliding_window=24), tokens(2, 60)
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    caches = cache_of(model, "bf16", padding=mask), exact(tiny("Mistral", attention="sdpa", sliding_window=24))
    for chunk in ids.split((40, *(1,) * 10, 10), dim=1):
        end = caches[0].get_seq_length() + chunk.shape[1]
        got = forward(model, chunk, caches[0], mask[:, :end])
        want = forward(tiny("Mistral", attention="sdpa", sliding_window=24), chunk, caches[1], mask[:, :end])
        seen = mask[:, end - chunk.shape[1] : end].bool()
        assert_near(got[seen], want[seen], 2e-2)
    wide = forward(tiny("Mistral", attention=attention, sliding_window=None), ids, None)
    assert (wide[0, -1] - want[0, -1]).abs().max() > 0.2


def test_soft_capping():
    """Gemma 2: windows in every other layer, soft-capped scores of another scale; centred keys are refused by name."""
    options = {"sliding_window": 16, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 20}
    model, plain = (tiny("Gemma2", attention=name, **options) for name in ("jkv", "eager"))
    caches, ids = (cache_of(model, "bf16"), exact(plain)), tokens(1, 40)
    for chunk in ids.split((30, *(1,) * 10), dim=1):
        got, want = forward(model, chunk, caches[0]), forward(plain, chunk, caches[1])
        assert_near(got, want, 1e-2)
    with pytest.raises(JkvError, match=r"softcap is not possible with scheme 'kivi:bits=2'.*use center=off"):
        forward(model, ids, cache_of(model, "kivi:bits=2"))


def test_without_a_jkv_cache_it_is_sdpa():
    """Attention implementation "jkv" serves other caches and none: windows and padding included."""
    for options in ({}, {"sliding_window": 16}):
        kind = "Mistral" if options else "Llama"
        model, plain = (tiny(kind, attention=name, **options) for name in ("jkv", "sdpa"))
        ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.int64)
        mask[1, :5] = 0
        caches = exact(model), exact(plain)
        for begin, end in ((0, 30), (30, 31), (31, 40)):
            got = forward(model, ids[:, begin:end], caches[0], mask[:, :end])
            want = forward(plain, ids[:, begin:end], caches[1], mask[:, :end])
            seen = mask[:, begin:end].bool()
            torch.testing.assert_close(got[seen], want[seen], **CLOSE)
        torch.testing.assert_close(forward(model, ids, None), forward(plain, ids, None), **CLOSE)


_SERVE = """
import sys, torch, transformers
from torch_bridge.description import from_json
from torch_bridge.hf import JkvCache

config = transformers.LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, head_dim=32, pad_token_id=None, attn_implementation="jkv")
model = transformers.LlamaForCausalLM(config).eval()
layer = from_json(open(sys.argv[1]).read())
cache = JkvCache([layer] * 2, config=model.config)
out = model.generate(torch.arange(40)[None], past_key_values=cache, max_new_tokens=30, do_sample=False)
assert cache.get_seq_length() == out.shape[1] - 1 >= 40
print(sorted(name for name in sys.modules if name.split(".")[0] in ("jax", "jaxlib", "flax", "ml_dtypes")))
"""


def test_generating_imports_no_jax(tmp_path):
    path = tmp_path / "scheme.json"
    path.write_text(describe_layers("kivi:bits=2", 32, 2)[0].to_json())
    made = subprocess.run([sys.executable, "-c", _SERVE, str(path)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert made.stdout.strip() == "[]"
