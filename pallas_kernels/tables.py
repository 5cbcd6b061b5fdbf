"""Calibration arrays as kernel operands: only those that a function reads, and look-up tables as references."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jkv.core import Array


class _Recorder(Mapping[str, Any]):
    """A mapping that remembers which of its entries were asked for."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.arrays = arrays
        self.asked: dict[str, None] = {}

    def __getitem__(self, key: str) -> Any:
        self.asked[key] = None
        return self.arrays[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)


def arrays_read(function: Callable[..., Any], calib: Mapping[str, Array], *avals: Any) -> dict[str, Array]:
    """The entries of one side's ``calib`` (leaves ``[H, ...]``) that ``function(calib, *avals)`` reads, in order."""
    recorder = _Recorder({key: jnp.zeros(a.shape[1:], a.dtype) for key, a in calib.items()})
    jax.eval_shape(lambda *values: function(recorder, *values), *avals)
    return {key: calib[key] for key in recorder.asked}


def spec_of(array: Array, head: Callable[..., Any]) -> pl.BlockSpec:
    """One head's part of a ``[H, ...]`` operand; ``head(*program_ids)`` is its index."""
    rest = array.shape[1:]
    return pl.BlockSpec((None, *rest), lambda *ids: (head(*ids), *(0 for _ in rest)))


class HeadArrays(Mapping[str, Any]):
    """What codecs see of one head's operands inside a kernel: scalars and matrices as values, vectors as references.

    A vector is a table: codes look their levels up in it, by an index of any shape.
    """

    def __init__(self, refs: Mapping[str, Any]) -> None:
        self.refs = refs

    def __getitem__(self, key: str) -> Any:
        ref = self.refs[key]
        return ref if ref.ndim == 1 else ref[...]

    def __iter__(self) -> Iterator[str]:
        return iter(self.refs)

    def __len__(self) -> int:
        return len(self.refs)
