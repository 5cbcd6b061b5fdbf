"""The plain torch implementation: any device, no JAX, the same bytes as :mod:`jkv` and the oracle of what is faster.

Ops take a :class:`torch_bridge.description.Description` and one layer of :func:`torch_bridge.binding.bind_layers`.
Pools, ``uint8[num_blocks, H, block bytes]``, are updated in place; everything else is a function of its arguments.
Nothing records a gradient. Bytes are those of JAX for zeros and for keys and values whose squares float32 holds well,
magnitudes of about 1e-15 to 1e15; beyond that backends differ about overflow and subnormal numbers.
"""

from torch_bridge.reference.attend import decode_attention, extend_attention, paged_attention
from torch_bridge.reference.place import Exact
from torch_bridge.reference.query import prepare_query
from torch_bridge.reference.read import dequantize_pages
from torch_bridge.reference.ring import append_tail
from torch_bridge.reference.write import flush_group, write_kv, write_pages

__all__ = [
    "Exact",
    "append_tail",
    "decode_attention",
    "dequantize_pages",
    "extend_attention",
    "flush_group",
    "paged_attention",
    "prepare_query",
    "write_kv",
    "write_pages",
]
