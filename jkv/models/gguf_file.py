"""A reader of the GGUF container: metadata as Python values, tensors as views into the mapped file.

Every length is checked against the file before it is followed, so a truncated or damaged file ends in one sentence that
names the entry, and reading the hundred thousand strings of a vocabulary takes a fraction of a second.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jkv.errors import JkvError

_MAGIC = b"GGUF"
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the tensor table; ``shape`` is row-major, as numpy has it."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GGUFFile:
    """An opened file. ``metadata`` by key, ``tensors`` by name, ``data`` the mapped bytes of the whole file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: np.ndarray

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value, or the default."""
        return self.metadata.get(key, default)

    def dequantize(self, name: str) -> np.ndarray:
        """A tensor as float32 in its row-major shape. Raises :class:`JkvError` for a type that cannot be read."""
        gguf = _library()
        tensor = self.tensors[name]
        kind = gguf.GGMLQuantizationType(tensor.kind)
        block, width = gguf.GGML_QUANT_SIZES[kind]
        rows = self.data[tensor.offset : tensor.offset + math.prod(tensor.shape) // block * width]
        if kind == gguf.GGMLQuantizationType.F32:
            return rows.view("<f4").reshape(tensor.shape).astype(np.float32)
        try:
            values = gguf.quants.dequantize(rows.reshape(-1, tensor.shape[-1] // block * width), kind)
        except NotImplementedError as error:
            raise JkvError(f"{self.path.name}: tensor {name} has type {kind.name}, which cannot be read") from error
        return np.ascontiguousarray(values, np.float32).reshape(tensor.shape)


def open_gguf(path: Path) -> GGUFFile:
    """Map a GGUF file and read its tables. Raises :class:`JkvError` naming the file and what is wrong in it."""
    if path.stat().st_size < 24:
        raise JkvError(f"{path.name}: not a GGUF file, or truncated: only {path.stat().st_size} bytes")
    data = np.memmap(path, np.uint8, mode="r")
    cursor = _Cursor(path.name, data)
    if bytes(data[:4]) != _MAGIC:
        raise JkvError(f"{path.name}: not a GGUF file (it starts with {bytes(data[:4])!r})")
    cursor.at = 4
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise JkvError(f"{path.name}: GGUF version {version} is not supported; allowed: 2 and 3, little-endian")
    tensor_count, key_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for index in range(key_count):
        cursor.entry = f"metadata entry {index + 1} of {key_count}"
        key = cursor.string()
        cursor.entry = f"metadata entry {key}"
        metadata[key] = cursor.value(cursor.scalar("I"))
    entries = []
    for index in range(tensor_count):
        cursor.entry = f"tensor entry {index + 1} of {tensor_count}"
        name = cursor.string()
        sizes = [cursor.scalar("Q") for _ in range(min(cursor.scalar("I"), 8))]
        entries.append((name, tuple(reversed(sizes)), cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise JkvError(f"{path.name}: general.alignment is {alignment!r}; allowed: a positive integer")
    start = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in entries:
        tensors[name] = GGUFTensor(name, shape, kind, start + offset)
        _check_extent(path.name, tensors[name], data.size)
    return GGUFFile(path, metadata, tensors, data)


def _check_extent(file: str, tensor: GGUFTensor, size: int) -> None:
    gguf = _library()
    try:
        block, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.kind)]
    except (ValueError, KeyError):
        raise JkvError(f"{file}: tensor {tensor.name} has the unknown type number {tensor.kind}") from None
    if not tensor.shape or tensor.shape[-1] % block or 0 in tensor.shape:
        raise JkvError(f"{file}: tensor {tensor.name} has shape {list(tensor.shape)}, not whole blocks of {block}")
    end = tensor.offset + math.prod(tensor.shape) // block * width
    if end > size:
        raise JkvError(f"{file}: truncated: tensor {tensor.name} ends at byte {end} but the file has {size}")


class _Cursor:
    """Reads values in order; ``entry`` says in errors what was being read."""

    def __init__(self, file: str, data: np.ndarray):
        self.file, self.view, self.at, self.entry = file, data.data, 0, "the header"

    def take(self, count: int) -> memoryview:
        if count > len(self.view) - self.at:
            raise JkvError(f"{self.file}: truncated or damaged in {self.entry} (byte {self.at} of {len(self.view)})")
        self.at += count
        return self.view[self.at - count : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return bytes(self.take(self.scalar("Q"))).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise JkvError(f"{self.file}: {self.entry} has the unknown type number {kind}")
        item, count = self.scalar("I"), self.scalar("Q")
        if item == _ARRAY:
            raise JkvError(f"{self.file}: {self.entry} is an array of arrays, which no supported model has")
        if item in _SCALARS:
            code = _SCALARS[item]
            return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code))))
        return [self.value(item) for _ in range(count)]


def _library() -> Any:
    try:
        import gguf
    except ImportError:
        raise JkvError("reading a GGUF file needs the Python package gguf: pip install gguf") from None
    return gguf
