"""The demo model in transformers, for a second opinion on logits and on greedy text."""

from __future__ import annotations

import gguf
import numpy as np

from tests.models.checkpoints import interleave


def torch_demo(path):
    """A transformers model in float32 with the demo file's weights, read by the gguf package's own reader."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(_weights(path, torch), strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def _weights(path, torch):
    """The file read a second way: the gguf package's own reader, and the row order undone by sorting it."""
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    weights = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        pieces = tensor.name.split(".")
        if pieces[0] == "blk":
            heads = {"attn_q": 9, "attn_k": 3}.get(pieces[2])
            if heads:
                values = values[np.argsort(interleave(np.arange(heads * 64), heads))]
            name = f"model.layers.{pieces[1]}.{parts[pieces[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[pieces[0]]
        weights[name] = torch.from_numpy(values)
    return weights
