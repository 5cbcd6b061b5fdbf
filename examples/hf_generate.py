"""Generate with transformers from a quantized cache, and compare its bytes and its text with those of DynamicCache.

    python examples/hf_generate.py [--model FOLDER] [--scheme SPEC]... [--attention jkv] [--small]

Without --model it is jkv's demo model, handed over in memory. A scheme that needs a calibration gets one (--calib FILE,
or made on the shipped text and kept).
"""

from __future__ import annotations

import argparse
import warnings

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from jkv.evaluate.calibrations import calibration_for
from jkv.models import load
from jkv.registry import parse
from jkv.texts import evaluation_texts
from torch_bridge.hf import JkvCache
from torch_bridge.hf_model import to_transformers

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="demo", help="'demo', or a Hugging Face folder with tokenizer.json")
parser.add_argument("--scheme", action="append", help="a spec; may be repeated")
parser.add_argument("--calib", help="a calibration file of the model")
parser.add_argument("--attention", default="jkv", help="attention implementation: jkv reads pages, sdpa dense keys")
parser.add_argument("--prompt", help="by default the beginning of a shipped text")
parser.add_argument("--tokens", type=int, default=24, help="how many to generate")
parser.add_argument("--small", action="store_true", help="a few tokens only")
args = parser.parse_args()
warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)  # it is `cache` from 5.40 on
torch.set_num_threads(max(1, torch.get_num_threads() // 2))  # on busy cores, threads that wait for each other are slow

jkv_model = load(args.model)
if args.model == "demo":
    model = to_transformers(jkv_model, torch.bfloat16, args.attention)
else:
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto", attn_implementation=args.attention)
prompt = args.prompt or evaluation_texts()["encyclopedia"][: 300 if args.small else 1500].rsplit(" ", 1)[0]
ids = torch.tensor([jkv_model.tokenizer.encode(prompt)])


def text(cache: DynamicCache | JkvCache) -> str:
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=6 if args.small else args.tokens,
        do_sample=False,
        pad_token_id=jkv_model.config.eos_token_ids[0],
    )
    return jkv_model.tokenizer.decode(found[0, ids.shape[1] :].tolist())


exact = DynamicCache(config=model.config)
print(f"...{prompt[-100:]}\n\n[DynamicCache]{text(exact)}")
dense = sum(layer.keys.nbytes + layer.values.nbytes for layer in exact.layers)
print(f"  cache {dense:,} bytes for {exact.get_seq_length()} tokens")
for spec in args.scheme or ["bf16", "kivi:bits=4", "kivi:bits=2"]:
    calibration = calibration_for(jkv_model, [parse(spec)], args.calib, only_needed=True)
    cache = JkvCache(spec, calibration, config=model.config)
    print(f"\n[{spec}]{text(cache)}")
    print(f"  cache {cache.nbytes:,} bytes with room for {cache.store.max_tokens} tokens")
