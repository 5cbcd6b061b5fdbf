"""Kernels that are lowered when they are asked for, where JAX is installed, and kept on disk as small bundles."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

import jkv
import pallas_kernels
from jkv.errors import JkvError
from pallas_kernels.bundle.facts import Facts
from pallas_kernels.bundle.format import Kernel, Variant
from pallas_kernels.bundle.read import Bundle, load_bundle
from pallas_kernels.lowered import Lowered
from torch_bridge.binaries import cache_folder
from torch_bridge.lowering_worker import worker


class Lowering:
    """A source of kernels like :class:`pallas_kernels.bundle.read.Bundle`, made on demand.

    Lowering takes seconds and happens in another process (:mod:`pallas_kernels.bundle.lower`): this one imports no JAX.
    """

    def __init__(self, folder: Path | None = None):
        self._folder = folder or cache_folder().parent / "lowered"
        self._found: dict[str, Bundle] = {}
        self._worker = worker()

    def kernel(self, op: str, facts: Facts, target: str) -> Kernel:
        """The entry of one operation for one setting.

        Raises:
          JkvError: where JAX is missing, or the scheme has no such kernel.
        """
        return self._bundle(op, facts, target).kernel(op, facts, target)

    def text(self, kernel: Kernel, variant: Variant) -> Lowered:
        return self._holding(variant.file).text(kernel, variant)

    def image(self, variant: Variant, target: str) -> bytes | None:
        return None

    def table(self, name: str) -> np.ndarray:
        for bundle in self._found.values():
            if bundle.has_table(name):
                return bundle.table(name)
        raise KeyError(name)

    def _holding(self, file: str) -> Bundle:
        return next(bundle for bundle in self._found.values() if file in bundle.manifest.files)

    def _bundle(self, op: str, facts: Facts, target: str) -> Bundle:
        asked = dataclasses.asdict(facts)
        text = json.dumps(asked, sort_keys=True)
        name = hashlib.sha256("\0".join((sources(), target, type(facts).__name__, text)).encode()).hexdigest()[:32]
        if name not in self._found:
            self._found[name] = _opened(self._folder / name) or self._make(name, op, asked, target)
        return self._found[name]

    def _make(self, name: str, op: str, facts: dict[str, Any], target: str) -> Bundle:
        if importlib.util.find_spec("jax") is None:
            raise JkvError(f"{op!r} must be lowered, and jax is not installed; give a bundle that has it (jkv build)")
        folder = self._folder / name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise JkvError(f"{str(self._folder)!r} cannot be made: {error.strerror or error}") from None
        shutil.rmtree(folder, ignore_errors=True)  # it is not there, or damaged
        reason = self._worker.lower(str(folder), target, op, facts)
        if reason:
            raise JkvError(f"{op!r} could not be lowered for {target}: {reason}")
        return load_bundle(folder)


def _opened(folder: Path) -> Bundle | None:
    """What was lowered before; None where there is nothing, or it is damaged."""
    try:
        return load_bundle(folder)
    except JkvError:
        return None


@functools.cache
def sources() -> str:
    """A digest of what lowers: kernels of another state of the code are other kernels."""
    found = hashlib.sha256()
    for package in (jkv, pallas_kernels):
        root = Path(package.__file__ or "").parent
        for path in sorted(root.rglob("*.py")):
            found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()
