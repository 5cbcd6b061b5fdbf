"""Text generation from a quantized cache: jitted prefill and decode steps with the cache donated.

``prefill_step`` and ``decode_step`` are the functional pieces; ``stream_text`` is the loop of ``jkv generate``.
Decoding is greedy, so that two caches can be compared token for token.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.attend import attend
from jkv.binding import bind_layers, check_calibration
from jkv.cache import KVCache, LayerCache, advance, init_cache, layer_view
from jkv.calibration import Calibration, check_scheme
from jkv.core import PAGE_TOKENS, Array, Scheme
from jkv.errors import JkvError
from jkv.models.load import Model
from jkv.plan import plan_layers
from jkv.registry import check_head_dim
from jkv.write import append, prefill, seal

_CHUNK = 64  # prompts are padded to a multiple of this, so that few lengths are compiled


@dataclasses.dataclass
class Stats:
    """What one generation cost; filled in while the text streams."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    cache_bytes: int = 0
    bf16_bytes: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second, compilation left out."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 and self.new_tokens > 1 else 0.0

    def to_json(self) -> dict[str, Any]:
        """All fields and the rate."""
        return dataclasses.asdict(self) | {"tokens_per_second": self.tokens_per_second}


def bind_model(model: Model, scheme: Scheme, calibration: Calibration | None) -> list[Any]:
    """Calibration arrays of every layer, checked against the model.

    Raises:
      JkvError: for a calibration of another model, or one that lacks what the scheme needs.
    """
    check_calibration(model, calibration)
    check_scheme(calibration, scheme)
    check_head_dim(scheme, model.config.head_dim)
    return bind_layers(plan_layers(scheme, model.config.num_layers), model, calibration)


@functools.partial(jax.jit, donate_argnames="layer")
def _prefill_layer(
    layer: LayerCache, view: KVCache, calib: Any, q: Array, k: Array, v: Array, counts: Array, start: Array
) -> tuple[Array, LayerCache, Array]:
    view = dataclasses.replace(view, layers=(layer,))
    out = attend(view, [calib], 0, q, fresh=(k, v), counts=counts, start=start)
    view = prefill(view, [calib], 0, k, v, counts, start)
    return out, view.layers[0], view.nonfinite


@functools.partial(jax.jit, donate_argnames="layer")
def _append_layer(
    layer: LayerCache, view: KVCache, calib: Any, q: Array, k: Array, v: Array, active: Array
) -> tuple[Array, LayerCache, Array]:
    view = append(dataclasses.replace(view, layers=(layer,)), [calib], 0, k, v, active)
    return attend(view, [calib], 0, q, pending=1), view.layers[0], view.nonfinite


@functools.partial(jax.jit, donate_argnames="layer")
def _seal_layer(layer: LayerCache, view: KVCache, calib: Any, active: Array) -> LayerCache:
    return seal(dataclasses.replace(view, layers=(layer,)), [calib], active).layers[0]


def _through(cache: KVCache, calib: list[Any], run: Any, *args: Any) -> Any:
    """An attention that runs ``run`` on one layer of the cache in the state, and puts the layer back."""

    def attention(index: int, q: Array, k: Array, v: Array, cache: KVCache) -> tuple[Array, KVCache]:
        view = dataclasses.replace(layer_view(cache, index), layers=())
        out, layer, nonfinite = run(cache.layers[index], view, calib[index], q, k, v, *args)
        layers = (*cache.layers[:index], layer, *cache.layers[index + 1 :])
        return out, dataclasses.replace(cache, layers=layers, nonfinite=nonfinite)

    return attention


def prefill_step(
    model: Model, calib: list[Any], cache: KVCache, tokens: Array, counts: Array, start: Array
) -> tuple[Array, KVCache]:
    """Write a chunk of prompt ``tokens: int[B, T]`` and return the logits ``[B, V]`` after each row's last token.

    Row b's ``counts[b]`` tokens stand after ``start[b]`` tokens of padding on the left (padding on the right is what is
    left over). The chunk attends to what the cache holds already and, unquantized and causal, to itself. The cache's
    layers are donated. Compiled per layer, so a model of any depth compiles as fast as one layer; wrap it in
    ``jax.jit`` to compile the whole step as one.
    """
    at = jnp.arange(tokens.shape[1]) - start[:, None]
    positions = cache.length[:, None] + jnp.clip(at, 0)
    attention = _through(cache, calib, _prefill_layer, counts, start)
    x, cache = model.decoder.hidden(tokens, positions, attention, cache)
    last = jnp.clip(start + counts - 1, 0)[:, None, None]
    return model.decoder.head(jnp.take_along_axis(x, last, axis=1)[:, 0]), advance(cache, counts)


def decode_step(
    model: Model, calib: list[Any], cache: KVCache, tokens: Array, active: Array, page_full: bool = True
) -> tuple[Array, KVCache]:
    """Append one token ``int[B]`` to every active row and return the next logits ``[B, V]``; layers are donated.

    ``page_full=False`` says that no row fills a page in this step, so there is nothing to seal.
    """
    attention = _through(cache, calib, _append_layer, active)
    x, cache = model.decoder.hidden(tokens[:, None], cache.length[:, None], attention, cache)
    if page_full:
        layers = [
            _seal_layer(layer, dataclasses.replace(layer_view(cache, index), layers=()), calib[index], active)
            for index, layer in enumerate(cache.layers)
        ]
        cache = dataclasses.replace(cache, layers=tuple(layers))
    return model.decoder.head(x[:, 0]), advance(cache, active)


def cache_for(model: Model, scheme: Scheme, batch: int, max_tokens: int) -> KVCache:
    """An empty cache that fits the model."""
    config = model.config
    return init_cache(
        scheme,
        batch=batch,
        max_tokens=max_tokens,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def generate_ids(
    model: Model,
    scheme: Scheme,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    calibration: Calibration | None = None,
    stats: Stats | None = None,
) -> Iterator[np.ndarray]:
    """Greedy decoding of a ragged batch: yields the next id of every row, ``int32[B]``, until all rows have ended.

    A row that has produced an end-of-sequence id stays in the batch unchanged and yields -1 from then on.

    Raises:
      JkvError: before any work, for an empty batch or prompt, ids outside the vocabulary, or a length beyond the
        model's context; while decoding, if a key or value is not finite.
    """
    lengths = _check(model, prompts, max_tokens)
    calib = bind_model(model, scheme, calibration)
    stats = Stats() if stats is None else stats
    longest = -(-max(lengths) // _CHUNK) * _CHUNK
    tokens = np.zeros((len(prompts), longest), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    cache = cache_for(model, scheme, len(prompts), longest + max_tokens)
    stats.prompt_tokens, stats.cache_bytes = sum(lengths), cache.nbytes
    stats.bf16_bytes = len(prompts) * cache.max_tokens * _bf16_token_bytes(cache)
    counts = jnp.asarray(lengths, jnp.int32)
    began = time.perf_counter()
    logits, cache = prefill_step(model, calib, cache, jnp.asarray(tokens), counts, jnp.zeros_like(counts))
    held = np.array(lengths)
    active = np.ones(len(prompts), bool)
    ends = np.asarray(model.config.eos_token_ids, np.int32)
    for index in range(max_tokens):
        best = np.asarray(jnp.argmax(logits, axis=-1), np.int32)
        _check_finite(cache)
        if index == 0:
            stats.prefill_seconds = time.perf_counter() - began
        active &= ~np.isin(best, ends)
        if not active.any():
            return
        stats.new_tokens += 1
        yield np.where(active, best, -1)
        if index + 1 == max_tokens:
            return
        began = time.perf_counter()
        held = held + active
        full = bool((held[active] % PAGE_TOKENS == 0).any())
        logits, cache = decode_step(model, calib, cache, jnp.asarray(best), jnp.asarray(active), full)
        logits.block_until_ready()
        took = time.perf_counter() - began
        if index == 0:
            stats.compile_seconds = took  # the first step compiles; it is left out of the rate
        else:
            stats.decode_seconds += took


def _check(model: Model, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[int]:
    if max_tokens < 1:
        raise JkvError(f"max_tokens={max_tokens} is not allowed; it must be at least 1")
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) == 0:
        raise JkvError("the prompt is empty; every prompt needs at least one token")
    limit = model.config.max_position_embeddings
    if max(lengths) + max_tokens > limit:
        raise JkvError(
            f"a prompt of {max(lengths)} tokens and max_tokens={max_tokens} exceed the model's context of {limit}"
        )
    for prompt in prompts:
        if min(prompt) < 0 or max(prompt) >= model.config.vocab_size:
            raise JkvError(f"token ids must lie in [0, {model.config.vocab_size}), and this prompt has {max(prompt)}")
    return lengths


def _bf16_token_bytes(cache: KVCache) -> int:
    """Bytes of one token in BF16, all layers and heads."""
    config = cache.config
    return 4 * config.head_dim * config.num_kv_heads * len(cache.layers)


def _check_finite(cache: KVCache) -> None:
    bad = int(np.asarray(cache.nonfinite).sum())
    if bad:
        raise JkvError(f"the model produced {bad} keys or values that are not finite; the cache stored zeros for them")


def stream_text(
    model: Model,
    scheme: Scheme,
    prompt: str,
    *,
    max_tokens: int,
    calibration: Calibration | None = None,
    stats: Stats | None = None,
) -> Iterator[str]:
    """Greedy continuation of ``prompt`` as pieces of text; ``stats`` is filled in meanwhile.

    Raises:
      JkvError: for a model without a tokenizer, and as :func:`generate_ids`.
    """
    if model.tokenizer is None:
        raise JkvError(f"the model {model.name} has no tokenizer; give a folder with tokenizer.json")
    ids = model.tokenizer.encode(prompt)
    found = generate_ids(model, scheme, [ids], max_tokens=max_tokens, calibration=calibration, stats=stats)
    yield from model.tokenizer.stream_decode(int(row[0]) for row in found)
