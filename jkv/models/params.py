"""From named tensors to a filled decoder, all or nothing.

A loader describes its file as a :class:`TensorSource`: tensor names, shapes and a function that reads one of them. A
table translates names to parameter paths such as ``layers.3.q_proj.weight``; every mismatch is found from names and
shapes alone, before any weight is read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jkv.errors import JkvError
from jkv.models.config import ModelConfig
from jkv.models.modeling import Decoder

SAMPLES = 256
_SHOWN = 8


@dataclass(frozen=True)
class TensorSource:
    """Tensors of a checkpoint: shapes by name, and ``read(name)`` giving one of them as a float array."""

    file: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]


# (pattern of a source name, parameter path): one table per file format.
NameTable = tuple[tuple[str, str], ...]


def assemble(config: ModelConfig, source: TensorSource, table: NameTable, dtype: Any) -> tuple[Decoder, str]:
    """Fill a decoder with the tensors of ``source`` cast to ``dtype``; returns it with its fingerprint.

    Raises one :class:`JkvError` listing every missing, unexpected or wrongly shaped tensor, or naming a tensor with
    non-finite values. No decoder is returned in that case.
    """
    graph, skeleton = nnx.split(nnx.eval_shape(lambda: Decoder(config)))
    wanted = {".".join(map(str, path)): tuple(leaf.shape) for path, leaf in nnx.to_flat_state(skeleton)}
    names = _match(wanted, source, table)
    digest = _digest(config)
    arrays = {}
    for path in sorted(wanted):
        array = source.read(names[path])
        if not np.isfinite(array).all():
            raise JkvError(f"{source.file}: tensor {names[path]} holds NaN or infinite values")
        digest.update(_seen(path, array))
        arrays[path] = jnp.asarray(array.astype(dtype, copy=False))
    return _fill(graph, skeleton, arrays), digest.hexdigest()


def fingerprint_of(config: ModelConfig, arrays: Mapping[str, np.ndarray]) -> str:
    """The fingerprint of a decoder with these tensors, by parameter path."""
    digest = _digest(config)
    for path in sorted(arrays):
        digest.update(_seen(path, arrays[path]))
    return digest.hexdigest()


def _digest(config: ModelConfig) -> Any:
    return hashlib.sha256(json.dumps(["jkv-model-1", config.computed()], sort_keys=True).encode())


def _seen(path: str, array: np.ndarray) -> bytes:
    return f"{path}{list(array.shape)}".encode() + sample(array).tobytes()


def sample(array: np.ndarray) -> np.ndarray:
    """Up to 256 evenly spaced elements in little-endian float32: what a fingerprint looks at."""
    count = min(SAMPLES, array.size)
    index = np.arange(count, dtype=np.int64) * (array.size - 1) // max(count - 1, 1)
    return array.reshape(-1)[index].astype("<f4")


def random_decoder(config: ModelConfig, seed: int = 0, scale: float = 0.02, dtype: Any = jnp.float32) -> Decoder:
    """A decoder with normally distributed weights (norm weights 1): for tests and shape studies, no file needed."""
    graph, skeleton = nnx.split(nnx.eval_shape(lambda: Decoder(config)))
    generator = np.random.default_rng(seed)
    arrays = {}
    for path, leaf in nnx.to_flat_state(skeleton):
        name = ".".join(map(str, path))
        value = np.ones(leaf.shape) if "norm" in name else generator.normal(0.0, scale, leaf.shape)
        arrays[name] = jnp.asarray(value, dtype)
    return _fill(graph, skeleton, arrays)


def _fill(graph: Any, skeleton: Any, arrays: Mapping[str, jax.Array]) -> Decoder:
    filled = [(path, leaf.replace(arrays[".".join(map(str, path))])) for path, leaf in nnx.to_flat_state(skeleton)]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _match(wanted: Mapping[str, tuple[int, ...]], source: TensorSource, table: NameTable) -> dict[str, str]:
    """Parameter path to source name, or one error with everything that does not fit."""
    names: dict[str, str] = {}
    problems = []
    for name, shape in source.shapes.items():
        path = translate(name, table)
        if path is None or path not in wanted:
            problems.append(f"unexpected tensor {name}")
            continue
        names[path] = name
        if tuple(shape) != wanted[path]:
            problems.append(f"tensor {name} has shape {list(shape)}, the config asks for {list(wanted[path])}")
    problems += [f"missing tensor {_source_name(path, table)}" for path in wanted if path not in names]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise JkvError(f"{source.file}: the tensors do not fit the config: {'; '.join(problems[:_SHOWN])}{more}")
    return names


def translate(name: str, table: NameTable) -> str | None:
    """The parameter path of a source tensor, or None when the table does not know it."""
    for pattern, path in table:
        match = re.fullmatch(re.escape(pattern).replace("N", r"(\d+)"), name)
        if match:
            return path.replace("N", match[1]) if match.groups() else path
    return None


def _source_name(path: str, table: NameTable) -> str:
    """How the file would spell a parameter path, for messages about missing tensors."""
    number = re.search(r"\d+", path)
    for pattern, template in table:
        if template == (path.replace(number[0], "N", 1) if number else path):
            return pattern.replace("N", number[0]) if number else pattern
    return path
