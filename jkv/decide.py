"""What a calibration decides for a scheme in one layer: centering on or off, and fixed rotation choices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.calibration import Calibration, bind, decision_key
from jkv.core import PAGE_TOKENS, SEGMENT, Array, Scheme
from jkv.select import MEASURE_NEEDS, assembly_error, gram_of_page, rotated_segments


def pages_of(k: Array) -> Array:
    """Keys ``[B, T, H, D]`` as pages ``[H, B * T / 32, 32, D]``."""
    by_head = jnp.moveaxis(k.astype(jnp.float32), 2, 0)
    return by_head.reshape(by_head.shape[0], -1, PAGE_TOKENS, k.shape[-1])


def decide(
    schemes: Sequence[Scheme], layer: dict[str, np.ndarray], k: Array, kv_heads: int, head_dim: int
) -> dict[str, np.ndarray]:
    """Everything that ``schemes`` leave to calibration in one layer, from its statistics and its keys ``[B, T, H, D]``.

    Centering switches first, then fixed choices, which see the keys as centering leaves them.
    """
    decided: dict[str, np.ndarray] = {}
    for scheme in schemes:
        key = decision_key(scheme)
        have = {name: a[None] for name, a in (layer | decided).items()}
        stub = {"num_layers": 1, "head_dim": head_dim, "model": "this model"}
        if "center" in scheme.needs:
            decided[f"center/{key}"] = np.array(True)
            if "choice" in scheme.needs:  # weigh centering with nothing rotated
                decided[f"choice/{key}"] = np.zeros((kv_heads, head_dim // SEGMENT + 1), bool)
            have |= {name: a[None] for name, a in decided.items()}
            on = bind(scheme, Calibration(have, stub), 0, kv_heads, head_dim)
            off = bind(scheme, Calibration(have | {f"center/{key}": np.array([False])}, stub), 0, kv_heads, head_dim)
            weighted = [float(_weighted_error(scheme, calib["k"], layer["w"], k)) for calib in (on, off)]
            decided[f"center/{key}"] = np.array(weighted[0] < weighted[1])
            have |= {name: a[None] for name, a in decided.items()}
        if "choice" in scheme.needs:
            have |= {f"choice/{key}": np.zeros((1, kv_heads, head_dim // SEGMENT + 1), bool)}
            calib = bind(_measuring(scheme), Calibration(have, stub), 0, kv_heads, head_dim)
            decided[f"choice/{key}"] = np.asarray(_fixed_choice(scheme, calib["k"], k))
    return decided


def _measuring(scheme: Scheme) -> Scheme:
    """The scheme with the needs of its measure added: a fixed choice is decided with the same statistics."""
    return dataclasses.replace(scheme, k_needs=scheme.k_needs | MEASURE_NEEDS[scheme.options["measure"]])


@functools.partial(jax.jit, static_argnums=0)
def _weighted_error(scheme: Scheme, calib: Any, w: Array, k: Array) -> Array:
    """``sum e^T W e`` over every fourth page for the whole K codec: what centering on and off are compared by.

    The two sums are far apart wherever it matters, and this keeps a calibration within twice its forward pass.
    """

    def head(calib: Any, w: Array, pages: Array) -> Array:
        def page(x: Array) -> Array:
            e = x - scheme.k.decode(calib, scheme.k.encode(calib, x))
            return jnp.einsum("td,de,te->", e, w, e, precision=jax.lax.Precision.HIGHEST)

        return jnp.sum(jax.lax.map(page, pages, batch_size=16))

    return jnp.sum(jax.vmap(head)(calib, w, pages_of(k)[:, ::4]))


@functools.partial(jax.jit, static_argnums=0)
def _fixed_choice(scheme: Scheme, calib: Any, k: Array) -> Array:
    """One choice per head ``[H, S + 1]``, by the errors summed over all calibration keys."""
    options = scheme.options

    def head(calib: Any, pages: Array) -> Array:
        centred = pages - calib["mean"] if "mean" in calib else pages
        one = functools.partial(gram_of_page, options["quantizer"], calib, measure=options["measure"])
        gram, whole = jax.lax.map(one, centred, batch_size=8)
        gram, whole = jnp.sum(gram, axis=0), jnp.sum(whole)
        rotated = rotated_segments(gram, options["exhaustive"])
        turned = whole < assembly_error(gram, rotated)
        return jnp.concatenate([rotated & ~turned, turned[None]])

    return jax.vmap(head)(calib, pages_of(k))
