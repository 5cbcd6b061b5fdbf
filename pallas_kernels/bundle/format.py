"""What a bundle of kernels says of each of them: plain data that a process without JAX reads.

A bundle is a folder: ``manifest.json``, Triton IR as text, tables as ``.npz``, and where they were asked for binaries
and assembly. Sizes that are known when a kernel is launched appear in it as :class:`Extent`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

FORMAT = "jkv-bundle"
VERSION = 1
MANIFEST = "manifest.json"
TABLES = "tables.npz"
ALIGNMENT = 32  # bytes: what Pallas promises Triton of every operand
SIZES = ("batch", "splits", "tokens", "pages", "width", "blocks", "places")  # what an extent may depend on
Role = Literal["in", "out", "inout", "table"]


@dataclasses.dataclass(frozen=True)
class Extent:
    """``factor`` times some sizes, divided by ``divisor`` and rounded up."""

    factor: int = 1
    sizes: tuple[str, ...] = ()
    divisor: int = 1

    def of(self, sizes: Mapping[str, int]) -> int:
        """The number for given sizes; ``KeyError`` where one is missing."""
        product = self.factor
        for name in self.sizes:
            product *= sizes[name]
        return -(-product // self.divisor)


@dataclasses.dataclass(frozen=True)
class Argument:
    """One pointer that a kernel takes. ``elements`` is how many of ``dtype`` there are behind it.

    An ``inout`` argument is updated in place: it appears twice, as an operand and as a result. A ``table`` comes with
    the bundle, under the name that it has there.
    """

    name: str
    dtype: str
    elements: Extent
    role: Role = "in"


@dataclasses.dataclass(frozen=True)
class Image:
    """A binary for one target; ``parameters`` are all pointers of a launch, hidden ones included."""

    file: str
    entry: str
    threads: int
    shared_bytes: int
    parameters: int


@dataclasses.dataclass(frozen=True)
class Variant:
    """One text of a kernel, for launches whose sizes do not exceed ``limits``; the first that fits counts."""

    file: str
    grid: tuple[Extent, Extent, Extent]
    num_warps: int
    num_stages: int
    limits: Mapping[str, int] = dataclasses.field(default_factory=dict)
    images: Mapping[str, Image] = dataclasses.field(default_factory=dict)
    assembly: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One operation for one setting (``facts``) on some targets. ``layout`` is a digest of the pages that it reads or
    writes, empty where there are none."""

    op: str
    name: str
    targets: tuple[str, ...]
    facts: Mapping[str, Any]
    layout: str
    arguments: tuple[Argument, ...]
    variants: tuple[Variant, ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """``made_with`` are versions of jkv, jax, jaxlib and, where something was compiled, triton; ``files`` checksums.

    Every pointer of a launch must be a multiple of ``alignment``.
    """

    made_with: Mapping[str, str]
    kernels: tuple[Kernel, ...]
    files: Mapping[str, str]
    alignment: int = ALIGNMENT


def to_json(manifest: Manifest) -> dict[str, Any]:
    """A manifest as what JSON has; extents as ``[factor, [sizes], divisor]``."""
    plain = dataclasses.asdict(manifest)
    for kernel, found in zip(manifest.kernels, plain["kernels"], strict=True):
        for argument, entry in zip(kernel.arguments, found["arguments"], strict=True):
            entry["elements"] = _extent_to_json(argument.elements)
        for variant, entry in zip(kernel.variants, found["variants"], strict=True):
            entry["grid"] = [_extent_to_json(extent) for extent in variant.grid]
    return {"format": FORMAT, "version": VERSION, **plain}


def from_json(plain: Mapping[str, Any]) -> Manifest:
    """The inverse of :func:`to_json`; ``KeyError``, ``TypeError`` or ``ValueError`` for what is no manifest."""
    kernels = tuple(map(_kernel_from_json, plain["kernels"]))
    return Manifest(plain["made_with"], kernels, plain["files"], int(plain["alignment"]))


def _extent_to_json(extent: Extent) -> list[Any]:
    return [extent.factor, list(extent.sizes), extent.divisor]


def _extent_from_json(plain: Any) -> Extent:
    factor, sizes, divisor = plain
    if not set(sizes) <= set(SIZES):
        raise ValueError(f"unknown sizes {sizes}")
    return Extent(int(factor), tuple(sizes), int(divisor))


def _kernel_from_json(plain: Mapping[str, Any]) -> Kernel:
    arguments = tuple(Argument(**a | {"elements": _extent_from_json(a["elements"])}) for a in plain["arguments"])
    variants = tuple(_variant_from_json(variant) for variant in plain["variants"])
    return Kernel(**dict(plain) | {"targets": tuple(plain["targets"]), "arguments": arguments, "variants": variants})


def _variant_from_json(plain: Mapping[str, Any]) -> Variant:
    x, y, z = map(_extent_from_json, plain["grid"])
    images = {target: Image(**image) for target, image in plain["images"].items()}
    return Variant(**dict(plain) | {"grid": (x, y, z), "images": images})


def seal(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest's JSON with a checksum of all else in it."""
    return {**plain, "sha256": _checksum(plain)}


def is_sealed(plain: Mapping[str, Any]) -> bool:
    """Whether the checksum is that of the rest."""
    rest = {key: value for key, value in plain.items() if key != "sha256"}
    return plain.get("sha256") == _checksum(rest)


def _checksum(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
