"""What a JkvCache refuses, by name and before anything is stored; and that it changes nothing of its model."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers

from jkv.errors import JkvError
from tests import cases
from tests.torch_bridge.models import SHAPE, cache_of, calib_of, exact, forward, generate, quantized, tiny, tokens
from torch_bridge.describe import describe
from torch_bridge.hf import JkvCache
from torch_bridge.hf_attention import attention_forward
from torch_bridge.hf_mask import Seen


def test_calibrations(tmp_path):
    """As an object or a path; of other sizes, of other weights, for another scheme, damaged, or none."""
    model, made = tiny(), calib_of(tiny())
    path = made.save(tmp_path / "calib.safetensors")
    spec = "flagrot-auto:bits=2,mode=key"
    for given in (made, path, str(path)):
        assert forward(model, tokens(1, 40), cache_of(model, spec, given)).isfinite().all()
    refused = functools.partial(pytest.raises, JkvError)
    with refused(match=r"scheme 'flagrot-auto:.*' needs a calibration \(center, mean, w\); make one with `jkv"):
        cache_of(model, spec)
    with refused(match=r"for a random model with .* = \(3, 2, 32\), but the model llama has \(2, 2, 32\)"):
        cache_of(model, spec, cases.calibration(32, layers=3))
    with refused(match=r"on a random model \(weights 0123456789ab\), but the model in use is llama \(weights ffff"):
        cache_of(model, spec, made, fingerprint="f" * 64)
    known = copy.copy(model.config)
    known.jkv_fingerprint = "e" * 64
    with refused(match=r"the model in use is llama \(weights eeeeeeeeeeee\); calibrate again"):
        JkvCache(spec, made, config=known)
    with refused(match=r"needs 'center' of its calibration.*again with --scheme flagrot-auto:bits=4,mode=key"):
        cache_of(model, "flagrot-auto:bits=4", made)
    with refused(match="no such file"):
        cache_of(model, spec, tmp_path / "nothing")
    with refused(match="scheme 'kivy' is unknown; nearest is 'kivi'"):
        cache_of(model, "kivy")


def test_models_that_it_cannot_serve():
    config = transformers.LlamaConfig(**(SHAPE | {"head_dim": 40}))
    with pytest.raises(JkvError, match=r"head_dim=40 .* must be a positive multiple of 32"):
        JkvCache("kivi", config=config)
    with pytest.raises(JkvError, match=r"spec describes 1 layers of head_dim \[64\]; the model llama has 2 of"):
        JkvCache([describe("kivi", 64)], config=tiny().config)
    with pytest.raises(JkvError, match="is an encoder and a decoder"):
        JkvCache("kivi", config=transformers.T5Config())
    hybrid = transformers.LlamaConfig(**SHAPE)
    hybrid.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(JkvError, match="layers of type 'linear_attention'"):
        JkvCache("kivi", config=hybrid)
    with pytest.raises(JkvError, match="max_tokens=0 is not allowed"):
        cache_of(tiny(), "kivi", max_tokens=0)


def test_padding_that_nobody_told():
    """Without attention implementation "jkv" a batch has to say what is padding; one row may not have any."""
    model, ids = tiny(attention="sdpa"), tokens(2, 40)
    cache = cache_of(model, "kivi:bits=2")
    with pytest.raises(JkvError, match=r"'sdpa' does not tell a cache which tokens of 2 rows are padding.*padding="):
        forward(model, ids, cache)
    assert cache.store is None and cache.get_seq_length() == 0
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with pytest.raises(JkvError, match=r"which tokens of 1 rows are padding"):
        generate(model, ids[:1], cache_of(model, "kivi:bits=2"), mask[:1])
    with pytest.raises(JkvError, match=r"padding of shape \(3, 40\) does not fit 2 rows"):
        forward(model, ids, cache_of(model, "kivi:bits=2", padding=torch.ones(3, 40)))
    told = cache_of(model, "kivi:bits=2", padding=mask)
    forward(model, ids, told, mask)
    assert told.store.length.tolist() == [37, 40]


def test_masks():
    model, ids = tiny(), tokens(2, 40)
    cache, mask = quantized(model, "kivi:bits=2"), torch.ones(2, 40, dtype=torch.int64)
    forward(model, ids[:, :30], cache, mask[:, :30])
    with pytest.raises(JkvError, match=r"attention_mask of shape \(2, 10\) does not fit; .* cover cached tokens .* 40"):
        forward(model, ids[:, 30:], cache, mask[:, 30:])
    changed = mask.clone()
    changed[0, 2] = 0
    with pytest.raises(JkvError, match="attention_mask differs from before in the 30 columns that are cached"):
        forward(model, ids[:, 30:], cache, changed)
    cache.reset()
    with pytest.raises(JkvError, match=r"attention_mask of shape \(2, 1, 40, 40\) is not possible"):
        forward(model, ids, cache, torch.zeros(2, 1, 40, 40))
    cache.reset()
    assert forward(model, ids, cache, mask).isfinite().all() and cache.store.length.tolist() == [40, 40]


def test_what_attention_does_not_know():
    q, k = torch.zeros(1, 4, 1, 32), torch.zeros(1, 2, 1, 32)
    layer = tiny().model.layers[0].self_attn
    for given, words in (
        ({"dropout": 0.1}, "dropout=0.1 is not possible .*model.eval"),
        ({"output_attentions": True}, "output_attentions is not possible"),
        ({"position_bias": k}, "position_bias is not possible"),
        ({"is_causal": False}, "is_causal=False is not possible"),
        ({"attention_mask": Seen(None, 8)}, "sliding_window=None of LlamaAttention is not that of its mask, 8"),
        ({"softcap": 30.0}, "softcap and sink logits need a JkvCache"),
    ):
        with pytest.raises(JkvError, match=words):
            attention_forward(layer, q, k, k, **({"attention_mask": None} | given))


def test_a_cache_of_another_model_or_batch():
    model, ids = tiny(), tokens(2, 40)
    cache = quantized(model, "kivi:bits=2", max_tokens=50)
    forward(model, ids, cache)
    with pytest.raises(JkvError, match="keys of 1 rows on cpu do not fit this cache of 2 rows on cpu; take a new one"):
        forward(model, ids[:1], cache)
    cache.reset()
    with pytest.raises(JkvError, match="60 tokens exceed max_tokens=50 of this cache"):
        forward(model, tokens(2, 60), cache)
    wide = tiny("Qwen2")
    cache.reset()
    with pytest.raises(JkvError, match="keys of 1 heads and head_dim 32 are not those of the model llama"):
        forward(wide, ids, cache)
    other = tiny(attention="sdpa")
    with pytest.raises(JkvError, match="attention of layer 0 did not run through implementation 'jkv', which config"):
        forward(other, ids, quantized(model, "kivi:bits=2"))
    assert forward(model, ids, quantized(other, "kivi:bits=2", padding=torch.ones_like(ids))).isfinite().all()


def test_layers_in_turn():
    cache, k = quantized(tiny(), "kivi:bits=2"), torch.zeros(1, 2, 4, 32)
    with pytest.raises(JkvError, match="layer 1 updates the cache where layer 0 is due"):
        cache.update(k, k, 1)
    marked, _ = cache.update(k, k, 0)
    cache.attend(0, torch.zeros(1, 4, 4, 32), marked, k, None)
    for call in (functools.partial(cache.crop, -1), functools.partial(cache.reorder_cache, torch.tensor([0]))):
        with pytest.raises(JkvError, match="the cache is in the middle of a forward pass, at layer 1"):
            call()
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.get_mask_sizes(7, 0) == (7, 0)


def test_nothing_of_the_model_changes():
    """Configs are as they were, and its own cache finds what it found."""
    model, ids = tiny(dtype=torch.bfloat16, attention="sdpa"), tokens(1, 40)
    before, generation = copy.deepcopy(model.config.to_dict()), copy.deepcopy(model.generation_config.to_dict())
    want = generate(model, ids, exact(model))
    cache = quantized(model, "kivi:bits=2")
    generate(model, ids, cache)
    assert model.config.to_dict() == before and model.generation_config.to_dict() == generation
    assert torch.equal(generate(model, ids, exact(model)), want)
    assert len(cache) == 2 and not cache.is_compileable and cache.is_croppable and not any(cache.is_sliding)
