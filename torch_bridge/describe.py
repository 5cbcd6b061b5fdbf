"""Describe schemes for processes without JAX; this side of the bridge needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jkv.core import Codec, Scheme, Stage
from jkv.errors import JkvError
from jkv.page import layout
from jkv.plan import plan_layers
from jkv.registry import parse
from torch_bridge.description import Description, Field, Page, StageDescription


def describe(scheme: str | Scheme, head_dim: int) -> Description:
    """``scheme`` (or its spec) at ``head_dim`` as plain data; the layer ranges of a mix are described with it.

    Raises:
      JkvError: for a spec or head_dim that jkv refuses, an evaluation-only scheme, or a scheme of which something is no
        plain data: a stage without a name, most likely.
    """
    scheme = parse(scheme) if isinstance(scheme, str) else scheme
    page = layout(scheme, head_dim)
    return Description(
        spec=scheme.spec,
        head_dim=head_dim,
        windows=scheme.windows,
        k=_stages(scheme, "K", scheme.k),
        v=_stages(scheme, "V", scheme.v),
        name=scheme.name,
        granularity=scheme.granularity,
        flags=scheme.flags,
        center=scheme.center,
        query_dtype=scheme.query_dtype,
        signed_v=scheme.signed_v,
        k_needs=scheme.k_needs,
        v_needs=scheme.v_needs,
        options=_plain_options(scheme, scheme.options),
        v_options=None if scheme.v_options is None else _plain_options(scheme, scheme.v_options),
        page=Page(tuple(Field(f.name, f.dtype.name, f.shape, f.offset) for f in page.fields), page.nbytes),
        default_tables={
            side: {name: _table(scheme, name, a) for name, a in table.items()}
            for side, table in scheme.tables(head_dim).items()
        },
        mix=tuple((layers, describe(part, head_dim)) for layers, part in scheme.mix),
    )


def describe_layers(scheme: str | Scheme, head_dim: int, num_layers: int) -> tuple[Description, ...]:
    """The description of every layer of a model: mixes and boundary layers resolved, equal layers one object.

    Raises:
      JkvError: as :func:`describe` and :func:`jkv.plan.plan_layers`.
    """
    scheme = parse(scheme) if isinstance(scheme, str) else scheme
    layers = plan_layers(scheme, num_layers).layers
    made = {layer: describe(layer, head_dim) for layer in dict.fromkeys(layers)}
    return tuple(made[layer] for layer in layers)


def _stages(scheme: Scheme, side: str, codec: Codec) -> tuple[StageDescription, ...]:
    return tuple(
        _stage(scheme, f"stage {number} of its {side} codec", *stage.described)
        for number, stage in enumerate(codec.stages, start=1)
    )


def _stage(scheme: Scheme, where: str, name: str, options: tuple[tuple[str, Any], ...]) -> StageDescription:
    if not name:
        raise JkvError(
            f"scheme {scheme.spec!r} cannot be described: {where} has no name, so only JAX can run it; "
            "give it one, Stage(..., name=..., options=...)"
        )
    return StageDescription(name, tuple((key, _plain(scheme, key, value)) for key, value in options))


def _plain_options(scheme: Scheme, options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(scheme, key, value) for key, value in options.items()}


def _plain(scheme: Scheme, key: str, value: Any) -> Any:
    if isinstance(value, Stage):
        value = value.described
    if isinstance(value, tuple) and len(value) == 2:
        return _stage(scheme, f"option {key!r}", *value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise JkvError(
        f"scheme {scheme.spec!r} cannot be described: {key}={value!r} is no plain data; options must be numbers, "
        "strings or stages"
    )


def _table(scheme: Scheme, name: str, values: Any) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise JkvError(
            f"scheme {scheme.spec!r} cannot be described: its table {name!r} is of dtype {array.dtype}; it must be of "
            "a dtype that numpy has"
        )
    return array
