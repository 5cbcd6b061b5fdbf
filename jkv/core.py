"""Stage, Codec and Scheme: the one idea of jkv.

A **stage** is a pair of pure functions, a **codec** is a chain of stages, and a **scheme** is a codec for K, a codec
for V, a granularity and what it needs from calibration (the shape of optax's ``GradientTransformation`` and
``chain``).

Every function here works on the rows of *one* KV head: ``x`` is ``[..., T, D]`` and ``calib`` holds that head's
arrays. Callers vmap over heads. Stages stay inside the part of ``jax.numpy`` that lowers through Triton, so the same
function is the reference and the body of a GPU kernel (CONTRIBUTING.md lists the rules).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jkv.units import PAGE_TOKENS as PAGE_TOKENS
from jkv.units import SEGMENT as SEGMENT
from jkv.units import Windows as Windows

Array = jax.Array
Calib = Mapping[str, Any]
Side = dict[str, Any]  # arrays, or pytrees of them, by name
Options = tuple[tuple[str, Any], ...]  # plain data by name: numbers, strings, and names with options of their own


def _no_query(calib: Calib, q: Array) -> Array:
    return q


class Stage(NamedTuple):
    """A pair of pure functions, and how a query absorbs the pair where it can.

    ``fwd(calib, x) -> (y, side)`` and ``inv(calib, y, side) -> x`` with ``x, y: [..., T, D]``; ``side`` is a dict of
    arrays to store. A stage with ``turns=True`` is an isometry (or a shift that softmax ignores): readers skip its
    ``inv`` and apply ``query(calib, q)`` to the query instead, once per step rather than once per key.
    ``bits(head_dim)`` is what the stage stores per value, in bits, in closed form. ``name`` and ``options`` say as
    plain data which stage this is, so that a process without JAX can have the same one; without a name only JAX can
    run it.
    """

    fwd: Callable[[Calib, Array], tuple[Array, Side]]
    inv: Callable[[Calib, Array, Side], Array]
    bits: Callable[[int], float] = lambda head_dim: 0.0
    turns: bool = False
    query: Callable[[Calib, Array], Array] = _no_query
    name: str = ""
    options: Options = ()

    @property
    def described(self) -> tuple[str, Options]:
        """Name and options: what an option that is a stage holds."""
        return self.name, self.options


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """Encoded rows: ``codes`` and the ``side`` arrays stored beside them. Leading axes are free."""

    codes: Array
    side: Side

    @property
    def nbytes(self) -> int:
        """Bytes of every array that is stored."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))


@dataclasses.dataclass(frozen=True)
class Codec:
    """A chain of stages.

    ``encode(calib, x[..., T, D]) -> Packed`` runs every ``fwd`` in order; ``decode`` runs every ``inv`` backwards and
    returns the original basis; ``read`` stops short of the stages that turn the basis, for readers that turn the
    query instead.
    """

    stages: tuple[Stage, ...]

    def encode(self, calib: Calib, x: Array) -> Packed:
        """``x[..., T, D]`` in any float dtype to its stored form; arithmetic is float32."""
        x = x.astype(jnp.float32)
        side: Side = {}
        for stage in self.stages:
            x, extra = stage.fwd(calib, x)
            clash = side.keys() & extra.keys()
            if clash:
                raise ValueError(f"two stages of one codec store the same side array {sorted(clash)}")
            side.update(extra)
        return Packed(x, side)

    def decode(self, calib: Calib, packed: Packed) -> Array:
        """The stored form to float32 ``[..., T, D]`` in the original basis."""
        return self._invert(calib, packed, turned=False)

    def read(self, calib: Calib, packed: Packed) -> Array:
        """The stored form to float32 ``[..., T, D]`` in the *stored* basis: turning stages are left to the query."""
        return self._invert(calib, packed, turned=True)

    def _invert(self, calib: Calib, packed: Packed, turned: bool) -> Array:
        x = packed.codes
        for stage in reversed(self.stages):
            if not (turned and stage.turns):
                x = stage.inv(calib, x, packed.side)
        return x

    def query(self, calib: Calib, q: Array) -> Array:
        """The query copies that match the stored basis: ``q[..., D] -> [C, ..., D]`` with C = 1, or 3 under flags.

        Identity: ``q . decode(key)`` equals the rotated copies dotted with ``read(key)``, up to the constant that
        centering takes off every score of one query.
        """
        q = q.astype(jnp.float32)[None]
        for stage in self.stages:
            if stage.turns:
                q = stage.query(calib, q)
        return q

    def turn_back(self, calib: Calib, x: Array) -> Array:
        """Undo the turning stages on ``x[..., T, D]``: what a reader applies to an attention output of turned V."""
        for stage in reversed(self.stages):
            if stage.turns:
                x = stage.inv(calib, x, {})
        return x

    def bits(self, head_dim: int) -> float:
        """Stored bits per value, in closed form."""
        return sum(stage.bits(head_dim) for stage in self.stages)


def chain(*stages: Stage) -> Codec:
    """Compose stages into a codec: ``chain(rotate("head"), affine(4), pack(4))``."""
    return Codec(tuple(stages))


Tables = Callable[[int], dict[str, dict[str, Any]]]


def no_tables(head_dim: int) -> dict[str, dict[str, Any]]:
    """A scheme whose codecs read no arrays."""
    return {"k": {}, "v": {}}


FlagPlacement = Literal["none", "group", "token"]
Granularity = Literal["group", "token"]
Center = Literal["off", "on", "auto"]


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A codec for K, a codec for V, and everything static about them. Frozen, hashable, equal when spec and
    windows are.

    ``granularity="group"`` means that K shares metadata along 32 tokens, so only whole pages can be encoded.
    ``k_needs`` and ``v_needs`` name the calibration entries without which the scheme cannot run; ``tables(head_dim)``
    gives, per side, the arrays its codecs read and the values they have without a calibration.
    ``options`` is what calibration has to know of the scheme's options, ``v_options`` the same for V where it differs.
    ``signed_v`` says that V stores scales whose sign bit is free for a flag.
    ``mix`` names the layers that use another scheme (:mod:`jkv.plan`).
    ``simulate`` marks an evaluation-only scheme: its reads cannot be served from rotated queries and it has no page.
    """

    spec: str = dataclasses.field(default="", kw_only=True)
    name: str = dataclasses.field(default="", compare=False, kw_only=True)
    k: Codec = dataclasses.field(compare=False, repr=False, kw_only=True)
    v: Codec = dataclasses.field(compare=False, repr=False, kw_only=True)
    granularity: Granularity = dataclasses.field(default="token", compare=False)
    # A layer of a plan has the plan's windows, which its own spec does not state.
    windows: Windows = dataclasses.field(default=Windows())
    flags: FlagPlacement = dataclasses.field(default="none", compare=False)
    center: Center = dataclasses.field(default="off", compare=False)
    k_needs: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)
    v_needs: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)
    signed_v: bool = dataclasses.field(default=False, compare=False)
    tables: Tables = dataclasses.field(default=no_tables, compare=False, repr=False)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    v_options: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False, repr=False)
    query_dtype: Literal["bf16", "fp8"] = dataclasses.field(default="bf16", compare=False)
    simulate: Any = dataclasses.field(default=None, compare=False, repr=False)
    mix: tuple[tuple[str, Scheme], ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def needs(self) -> frozenset[str]:
        """Calibration entries without which the scheme cannot run."""
        return self.k_needs | self.v_needs

    def bits(self, head_dim: int) -> float:
        """Mean stored bits per value of K and V at ``head_dim``, metadata included, in closed form."""
        return (self.k.bits(head_dim) + self.v.bits(head_dim)) / 2

    def token_bytes(self, head_dim: int) -> float:
        """Bytes of one token of one KV head, K and V together."""
        return (self.k.bits(head_dim) + self.v.bits(head_dim)) * head_dim / 8

    def page_bytes(self, head_dim: int) -> int:
        """Bytes of one page: 32 tokens of one KV head, K and V together."""
        exact = self.token_bytes(head_dim) * PAGE_TOKENS
        size = round(exact)  # bits such as 4 + 16/96 are no exact floats
        assert abs(exact - size) < 1e-6, "page size is a whole number of bytes"
        return size
