"""Float64 attention over the tokens of one row, with everything that models ask of it."""

from __future__ import annotations

import numpy as np

from pallas_kernels.options import AttentionOptions


def attention(q, k, v, position, seen, options: AttentionOptions) -> np.ndarray:
    """``q[T, Hq, D]`` at ``position[T]`` over ``k, v: [H, N, D]`` at positions ``0 .. N - 1``; zeros if none is seen.

    ``seen: bool[T, N]`` is what a query may see before its window.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[0]
    scores = np.einsum("thd,hnd->thn", q, np.repeat(k, group, axis=0)) * options.score_scale(q.shape[-1])
    if options.softcap is not None:
        scores = options.softcap * np.tanh(scores / options.softcap)
    if options.window is not None:
        seen = seen & (np.arange(k.shape[1]) > np.asarray(position)[:, None] - options.window)
    scores = np.where(seen[:, None], scores, -np.inf)
    if options.sink_logits is not None:
        logits = np.asarray(options.sink_logits, np.float64)[None, :, None]
        scores = np.concatenate([scores, np.broadcast_to(logits, (*scores.shape[:2], 1))], axis=2)
    top = scores.max(axis=-1, keepdims=True, initial=-1e300)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    share = (weights / np.where(total > 0, total, 1))[:, :, : k.shape[1]]
    return np.einsum("thn,hnd->thd", share, np.repeat(v, group, axis=0))


def error(got, want) -> float:
    """Relative error, norm-wise."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))
