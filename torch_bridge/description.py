"""A scheme as plain data: all that a process without JAX has to know of it.

:func:`torch_bridge.describe.describe` makes one where JAX is; as JSON it travels to where it is not. It has the
attributes of :class:`jkv.core.Scheme` that :mod:`jkv.calibration` looks at, so ``bind`` takes either.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jkv.errors import JkvError
from jkv.units import PAGE_TOKENS, Windows

FORMAT = "jkv-description"
VERSION = 1
_ITEM_BYTES = {"uint8": 1, "uint16": 2, "uint32": 4, "float16": 2, "bfloat16": 2}


class StageDescription(NamedTuple):
    """One stage of a codec: the name and the options it was made with, some of which are stages themselves."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def option(self, key: str) -> Any:
        """The value of one option."""
        return dict(self.options)[key]


class Field(NamedTuple):
    """One array of a page: :class:`jkv.page.Field` with its dtype by name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token's row, in a scheme of token granularity."""
        return self.nbytes // PAGE_TOKENS


@dataclasses.dataclass(frozen=True)
class Page:
    """The fields of one page and its size in bytes."""

    fields: tuple[Field, ...]
    nbytes: int


Tables = Mapping[str, Mapping[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Description:
    """A scheme at one head_dim. Frozen, hashable, equal when spec, head_dim, windows and stages are.

    ``k`` and ``v`` are the stages of the codecs, ``page`` is where the bytes of 32 tokens lie and ``default_tables``
    has, per side, the arrays that codecs read at the values they have without a calibration. The other fields are those
    of :class:`jkv.core.Scheme`, with plain data for the stages among ``options``.
    """

    spec: str
    head_dim: int
    windows: Windows
    k: tuple[StageDescription, ...]
    v: tuple[StageDescription, ...]
    name: str = dataclasses.field(compare=False)
    granularity: str = dataclasses.field(compare=False)
    flags: str = dataclasses.field(compare=False)
    center: str = dataclasses.field(compare=False)
    query_dtype: str = dataclasses.field(compare=False)
    signed_v: bool = dataclasses.field(compare=False)
    k_needs: frozenset[str] = dataclasses.field(compare=False)
    v_needs: frozenset[str] = dataclasses.field(compare=False)
    options: Mapping[str, Any] = dataclasses.field(compare=False, repr=False)
    v_options: Mapping[str, Any] | None = dataclasses.field(compare=False, repr=False)
    page: Page = dataclasses.field(compare=False, repr=False)
    default_tables: Tables = dataclasses.field(compare=False, repr=False)
    mix: tuple[tuple[str, Description], ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def needs(self) -> frozenset[str]:
        """Calibration entries without which the scheme cannot run."""
        return self.k_needs | self.v_needs

    def tables(self, head_dim: int) -> Tables:
        """The default tables, for the one head_dim that they were described at.

        Raises:
          JkvError: for another head_dim.
        """
        if head_dim != self.head_dim:
            raise JkvError(f"head_dim={head_dim} does not fit; {self.spec!r} was described at head_dim {self.head_dim}")
        return self.default_tables

    def to_json(self) -> str:
        """As one line of JSON, arrays and all; :func:`from_json` gives back what is equal in every bit."""
        return json.dumps(to_data(self), allow_nan=False)


def to_data(description: Description) -> dict[str, Any]:
    """What JSON can hold: dicts, lists, strings and numbers."""
    plain = ("spec", "head_dim", "name", "granularity", "flags", "center", "query_dtype", "signed_v")
    return {
        "format": FORMAT,
        "version": VERSION,
        **{key: getattr(description, key) for key in plain},
        "windows": dataclasses.asdict(description.windows),
        "k": [_stage_data(stage) for stage in description.k],
        "v": [_stage_data(stage) for stage in description.v],
        "k_needs": sorted(description.k_needs),
        "v_needs": sorted(description.v_needs),
        "options": _options_data(description.options),
        "v_options": None if description.v_options is None else _options_data(description.v_options),
        "page": {"nbytes": description.page.nbytes, "fields": [list(field) for field in description.page.fields]},
        "tables": {
            side: {name: _array_data(a) for name, a in table.items()}
            for side, table in description.default_tables.items()
        },
        "mix": [[layers, to_data(part)] for layers, part in description.mix],
    }


def from_json(text: str) -> Description:
    """The description that :meth:`Description.to_json` wrote.

    Raises:
      JkvError: for text that is no description, a damaged one, or one of a newer format.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise JkvError(f"a scheme's description is no JSON: {error}") from None
    return from_data(data)


def from_data(data: Any) -> Description:
    """The description of :func:`to_data`.

    Raises:
      JkvError: as :func:`from_json`.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise JkvError(f"this is no scheme's description; its format must be {FORMAT!r}")
    if data.get("version") != VERSION:
        raise JkvError(
            f"a scheme's description has version {data.get('version')!r}; this jkv reads version {VERSION}: "
            "describe the scheme again"
        )
    try:
        return _description(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise JkvError(f"the description of {data.get('spec')!r} is damaged: {type(error).__name__}: {error}") from None


def _description(data: dict[str, Any]) -> Description:
    return Description(
        spec=data["spec"],
        head_dim=data["head_dim"],
        windows=Windows(**data["windows"]),
        k=tuple(_stage(stage) for stage in data["k"]),
        v=tuple(_stage(stage) for stage in data["v"]),
        name=data["name"],
        granularity=data["granularity"],
        flags=data["flags"],
        center=data["center"],
        query_dtype=data["query_dtype"],
        signed_v=data["signed_v"],
        k_needs=frozenset(data["k_needs"]),
        v_needs=frozenset(data["v_needs"]),
        options=_options(data["options"]),
        v_options=None if data["v_options"] is None else _options(data["v_options"]),
        page=_page(data["page"]),
        default_tables={side: {name: _array(a) for name, a in table.items()} for side, table in data["tables"].items()},
        mix=tuple((layers, from_data(part)) for layers, part in data["mix"]),
    )


def _page(data: dict[str, Any]) -> Page:
    fields = tuple(Field(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in data["fields"])
    for field in fields:
        if field.offset < 0 or field.offset + field.nbytes > data["nbytes"]:
            raise ValueError(f"field {field.name!r} lies outside its page of {data['nbytes']} bytes")
    return Page(fields, data["nbytes"])


def _stage_data(stage: StageDescription) -> dict[str, Any]:
    return {"stage": stage.name, "options": _options_data(dict(stage.options))}


def _stage(data: dict[str, Any]) -> StageDescription:
    return StageDescription(data["stage"], tuple(_options(data["options"]).items()))


def _options_data(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _stage_data(v) if isinstance(v, StageDescription) else v for key, v in options.items()}


def _options(data: dict[str, Any]) -> dict[str, Any]:
    return {key: _stage(v) if isinstance(v, dict) else v for key, v in data.items()}


def _array_data(array: np.ndarray) -> dict[str, Any]:
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return {
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "base64": base64.b64encode(little.tobytes()).decode("ascii"),
    }


def _array(data: dict[str, Any]) -> np.ndarray:
    dtype = np.dtype(data["dtype"])
    try:
        raw = base64.b64decode(data["base64"], validate=True)
    except binascii.Error as error:
        raise ValueError(f"an array is no base64: {error}") from None
    return np.frombuffer(raw, dtype.newbyteorder("<")).astype(dtype, copy=False).reshape(data["shape"])
