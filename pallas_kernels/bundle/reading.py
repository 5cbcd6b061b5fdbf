"""Reading pages back."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels import read as read_kernel
from pallas_kernels.bundle.facts import Reading
from pallas_kernels.bundle.parts import PRIMES, Named, Part, array, calib_of, pool_of, scheme_of, sides_of


def read(facts: Reading) -> list[Part]:
    scheme = scheme_of(facts)
    x = array(facts.dtype, PRIMES["places"], facts.num_kv_heads, facts.head_dim)
    page = array("int32", PRIMES["pages"])
    arrays = calib_of(scheme, facts) | {"pool": pool_of(scheme, facts), "page": page, "row": page, "k": x, "v": x}
    for name in ("k/sketch", "v/sketch"):
        if name in arrays:  # as those who write have it
            arrays[name] = array(jnp.bfloat16, *arrays[name].shape)

    def function(named: Named) -> Named:
        operands = (named[name] for name in ("pool", "page", "row", "k", "v"))
        k, v = read_kernel.read_pages(scheme, sides_of(named), *operands, interpret=False)
        return {"k": k, "v": v}

    return [Part(function, arrays)]
