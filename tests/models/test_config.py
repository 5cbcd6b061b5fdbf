"""Configs: both spellings are read, and what is not implemented is refused by name."""

import pytest

from jkv.errors import JkvError
from jkv.models import RopeScaling, config_from_hf

from .checkpoints import TINY, hf_config, tiny

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_reads_its_own_fields_back(family):
    config = tiny(family=family)
    assert config_from_hf(hf_config(config)) == config
    assert hash(config_from_hf(hf_config(config))) == hash(config)


def test_old_and_new_rope_spellings_agree():
    old = hf_config(TINY) | {"rope_theta": 5e5, "rope_scaling": LLAMA3}
    new = hf_config(TINY) | {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}
    del new["rope_theta"]
    assert config_from_hf(old) == config_from_hf(new)
    assert config_from_hf(old).rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    linear = hf_config(TINY) | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert config_from_hf(linear).rope_scaling == RopeScaling("linear", 2.0)


def test_family_traits():
    qwen2 = config_from_hf(hf_config(tiny(family="qwen2")) | {"sliding_window": 8, "use_sliding_window": False})
    assert qwen2.qkv_bias and not qwen2.o_bias and not qwen2.qk_norm
    assert config_from_hf(hf_config(tiny(family="qwen3"))).qk_norm
    biased = config_from_hf(hf_config(TINY) | {"attention_bias": True})
    assert biased.qkv_bias and biased.o_bias
    assert config_from_hf(hf_config(TINY) | {"eos_token_id": [1, 2]}).eos_token_ids == (1, 2)


REFUSALS = {
    "gemma": ({"model_type": "gemma3_text"}, ["model_type", "'gemma3_text'", "llama, mistral, qwen2, qwen3"]),
    "no type": ({"model_type": None}, ["model_type", "None"]),
    "experts": ({"num_experts": 8}, ["num_experts is 8"]),
    "local experts": ({"num_local_experts": 4}, ["num_local_experts is 4"]),
    "soft cap": ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping is 30.0"]),
    "activation": ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "'silu'"]),
    "partial rotary": ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5"]),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
    "mlp bias": ({"mlp_bias": True}, ["mlp_bias is True"]),
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_type is 'yarn'", "'linear'", "'llama3'"]),
    "dynamic": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, ["rope_type is 'dynamic'"]),
    "per layer rope": ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["one flat record"]),
    "llama3 key": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor is missing"]),
    "layer types": ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "'sliding_attention'"]),
    "heads": ({"num_key_value_heads": 4}, ["num_heads is 6", "num_kv_heads is 4", "multiple"]),
    "missing": ({"vocab_size": None}, ["vocab_size is missing"]),
    "type": ({"hidden_size": "48"}, ["hidden_size is '48'", "positive integer"]),
    "token": ({"bos_token_id": "x"}, ["token id is 'x'"]),
    "layers": ({"num_hidden_layers": 5000}, ["num_layers is 5000", "1 to 1024"]),
    "zero": ({"num_hidden_layers": 0}, ["num_hidden_layers is 0"]),
    "theta": ({"rope_theta": -1.0}, ["rope_theta is -1.0", "positive number"]),
}


@pytest.mark.parametrize(("change", "words"), REFUSALS.values(), ids=REFUSALS)
def test_refusals_name_key_value_and_file(change, words):
    with pytest.raises(JkvError) as caught:
        config_from_hf(hf_config(TINY) | change, "models/config.json")
    message = str(caught.value)
    assert message.startswith("models/config.json")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_active_windows_are_refused_and_idle_ones_are_not():
    mistral = hf_config(tiny(family="mistral"))
    with pytest.raises(JkvError, match="sliding_window is 128"):
        config_from_hf(mistral | {"sliding_window": 128})
    config_from_hf(mistral | {"sliding_window": 256})
    qwen = hf_config(tiny(family="qwen2")) | {"sliding_window": 128, "use_sliding_window": True}
    with pytest.raises(JkvError, match="sliding_window is 128"):
        config_from_hf(qwen | {"max_window_layers": 1})
    config_from_hf(qwen | {"max_window_layers": 2})


def test_odd_head_dim_is_refused():
    with pytest.raises(JkvError, match="head_dim is 7"):
        tiny(head_dim=7)
