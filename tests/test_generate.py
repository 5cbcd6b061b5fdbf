"""Generation from a quantized cache: the same text as transformers in BF16, rows that do not depend on each other."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.errors import JkvError
from jkv.generate import Stats, bind_model, cache_for, decode_step, generate_ids, prefill_step, stream_text
from jkv.models import Model, demo_model_path, random_decoder
from jkv.registry import parse
from tests.models.checkpoints import TINY

SPECS = ["kivi:bits=2", "rtn:bits=4,tail=0,sink=4", "turboquant:bits=4,recent=32"]


@functools.cache
def tiny_model(**changes) -> Model:
    config = dataclasses.replace(TINY, head_dim=32, **changes)
    return Model(random_decoder(config, seed=1, scale=0.3), config, None, "tiny", "tiny")


def ids_of(model, spec, prompts, count, **options):
    found = list(generate_ids(model, parse(spec), prompts, max_tokens=count, **options))
    return np.stack(found, axis=1)


def prompts_of(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, TINY.vocab_size, length).tolist() for length in lengths]


@pytest.mark.parametrize("spec", SPECS)
def test_rows_of_a_ragged_batch_equal_single_rows(spec):
    model, prompts = tiny_model(eos_token_ids=()), prompts_of(1, 31, 33, 70)
    together = ids_of(model, spec, prompts, 40)
    for row, prompt in enumerate(prompts):
        np.testing.assert_array_equal(together[row], ids_of(model, spec, [prompt], 40)[0])


def test_bf16_text_equals_exact_attention():
    model, (prompt,) = tiny_model(eos_token_ids=()), prompts_of(20)
    ids = list(prompt)
    for _ in range(12):
        padded = np.array([ids + [0] * (32 - len(ids))])
        ids.append(int(model.decoder(padded)[0][0, len(ids) - 1].argmax()))
    np.testing.assert_array_equal(ids_of(model, "bf16", [prompt], 12)[0], ids[20:])


@pytest.mark.parametrize("spec", ["kivi:bits=2", "rtn:bits=4,tail=0"])
def test_left_padding_changes_nothing(spec):
    model, prompts = tiny_model(eos_token_ids=()), prompts_of(45, 64)
    calib = bind_model(model, parse(spec), None)
    longest = max(map(len, prompts))
    right, left = np.zeros((2, 2, longest), np.int32)
    for row, prompt in enumerate(prompts):
        right[row, : len(prompt)] = left[row, longest - len(prompt) :] = prompt
    counts = jnp.array([len(prompt) for prompt in prompts])
    logits, caches = [], []
    for tokens, start in ((right, jnp.zeros(2, jnp.int32)), (left, longest - counts)):
        cache = cache_for(model, parse(spec), 2, 128)
        found, cache = prefill_step(model, calib, cache, jnp.asarray(tokens), counts, start)
        logits.append(np.asarray(found))
        caches.append(cache)
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)
    assert caches[0].length.tolist() == caches[1].length.tolist() == [45, 64]


def test_a_whole_step_compiles_as_one():
    model, scheme = tiny_model(eos_token_ids=()), parse("kivi:bits=2")
    calib = bind_model(model, scheme, None)
    step = jax.jit(lambda cache, tokens, active: decode_step(model, calib, cache, tokens, active))
    tokens, active = jnp.array([3, 4]), jnp.array([True, True])
    one = step(cache_for(model, scheme, 2, 64), tokens, active)
    by_layer = decode_step(model, calib, cache_for(model, scheme, 2, 64), tokens, active)
    np.testing.assert_allclose(one[0], by_layer[0], atol=1e-5)
    assert one[1].length.tolist() == by_layer[1].length.tolist() == [1, 1]


def test_an_ended_row_stays_as_it_is():
    free = tiny_model(eos_token_ids=())
    prompts = prompts_of(8, 9, seed=3)
    plain = ids_of(free, "kivi:bits=2", prompts, 30)
    at = next(i for i in range(3, 20) if plain[0][i] not in plain[0][:i] and plain[0][i] not in plain[1])
    end = int(plain[0][at])
    model = dataclasses.replace(free, config=dataclasses.replace(free.config, eos_token_ids=(end,)))
    found = ids_of(model, "kivi:bits=2", prompts, 30)
    np.testing.assert_array_equal(found[1], plain[1])
    assert found[0].tolist() == [*plain[0][:at].tolist(), *[-1] * (30 - at)]


def test_stats_say_what_the_cache_takes():
    model, stats = tiny_model(eos_token_ids=()), Stats()
    ids_of(model, "kivi:bits=2", prompts_of(40), 8, stats=stats)
    cache = cache_for(model, parse("kivi:bits=2"), 1, 64 + 8)
    assert (stats.prompt_tokens, stats.new_tokens, stats.cache_bytes) == (40, 8, cache.nbytes)
    per_token = 4 * 32 * TINY.num_kv_heads * TINY.num_layers
    assert stats.bf16_bytes == cache.max_tokens * per_token
    assert stats.tokens_per_second > 0


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([], {}, "the prompt is empty"),
        ([[1], []], {}, "the prompt is empty"),
        ([[1, 10**6]], {}, "token ids must lie in"),
        ([[1]], {"max_tokens": 0}, "max_tokens=0 is not allowed"),
        ([[1]], {"max_tokens": 10**7}, "exceed the model's context"),
        ([[1]], {"spec": "flagrot-kivi:bits=2"}, "needs a calibration"),
    ],
)
def test_refusals(prompts, options, words):
    scheme = parse(options.pop("spec", "kivi:bits=2"))
    with pytest.raises(JkvError, match=words):
        next(generate_ids(tiny_model(), scheme, prompts, **({"max_tokens": 4} | options)))


def test_a_model_without_tokenizer_cannot_take_text():
    with pytest.raises(JkvError, match="has no tokenizer"):
        next(stream_text(tiny_model(), parse("bf16"), "hello", max_tokens=2))


@pytest.mark.demo
def test_bf16_text_equals_transformers(demo_model):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.models.reference import torch_demo

    prompt = "Norway, a kingdom in the north of Europe, is known for"
    ids = demo_model.tokenizer.encode(prompt)
    theirs = torch_demo(demo_model_path())
    with torch.no_grad():
        expected = theirs.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=40)[0, len(ids) :].tolist()
    ours = "".join(stream_text(demo_model, parse("bf16"), prompt, max_tokens=40))
    assert ours == demo_model.tokenizer.decode([i for i in expected if i not in demo_model.config.eos_token_ids])
