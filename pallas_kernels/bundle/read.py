"""Open a bundle: everything in it is checked before anything is used. Imports no JAX."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jkv._version import __version__
from jkv.errors import JkvError
from pallas_kernels.bundle.facts import Facts
from pallas_kernels.bundle.format import (
    FORMAT,
    MANIFEST,
    TABLES,
    VERSION,
    Kernel,
    Manifest,
    Variant,
    from_json,
    is_sealed,
)
from pallas_kernels.lowered import Lowered


class Bundle:
    """A bundle on disk whose files are what its manifest says."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self._kernels = {
            (kernel.op, target, _key(kernel.facts)): kernel for kernel in manifest.kernels for target in kernel.targets
        }

    def kernel(self, op: str, facts: Facts, target: str) -> Kernel:
        """The entry of one operation for one setting.

        Raises:
          JkvError: where the bundle has none, naming a fact that it has other values of.
        """
        found = self._kernels.get((op, target, _key(dataclasses.asdict(facts))))
        if found is None:
            raise JkvError(f"bundle {str(self.folder)!r} has no kernel {self._missing(op, facts, target)}")
        return found

    def text(self, kernel: Kernel, variant: Variant) -> Lowered:
        """A kernel's Triton IR, to compile."""
        text = self._read(variant.file).decode()
        return Lowered(kernel.name, text, (1, 1, 1), variant.num_warps, variant.num_stages)

    def image(self, variant: Variant, target: str) -> bytes | None:
        """A kernel's binary for a target, where the bundle was built with them."""
        return self._read(variant.images[target].file) if target in variant.images else None

    def table(self, name: str) -> np.ndarray:
        """An array that some kernel takes beside its operands."""
        return self._tables[name]

    def has_table(self, name: str) -> bool:
        return name in self._tables

    @functools.cached_property
    def _tables(self) -> Mapping[str, np.ndarray]:
        with np.load(io.BytesIO(self._read(TABLES))) as found:
            return dict(found)

    def _read(self, name: str) -> bytes:
        return _checked(self.folder, name, self.manifest.files[name])

    def _missing(self, op: str, facts: Facts, target: str) -> str:
        """What to say of a kernel that is not there: the first fact that nothing agrees with, after those before it."""
        left = [kernel for kernel in self.manifest.kernels if kernel.op == op and target in kernel.targets]
        if not left:
            targets = sorted({target for kernel in self.manifest.kernels for target in kernel.targets})
            return f"{op!r} for {target}; it has kernels for {', '.join(targets)}"
        for name, value in dataclasses.asdict(facts).items():
            agreeing = [kernel for kernel in left if kernel.facts.get(name) == value]
            if not agreeing:
                had = sorted({str(kernel.facts.get(name)) for kernel in left})
                close = difflib.get_close_matches(str(value), had, n=1, cutoff=0.0)
                shown = ", ".join(had) if len(had) < 6 else f"{len(had)} others such as {close[0]}"
                return f"{op!r} for {target} with {name}={value!r}; it has {shown}"
            left = agreeing
        raise AssertionError("a kernel that agrees with all facts was not found")


def load_bundle(folder: str | Path) -> Bundle:
    """Open a bundle and check every file of it.

    Raises:
      JkvError: for a folder that is no bundle, one made by another version of jkv, or a file that is missing, cut off
        or changed; the message names the file.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    try:
        plain = json.loads(path.read_text())
    except OSError as error:
        raise JkvError(f"bundle {str(folder)!r} cannot be opened: {MANIFEST}: {error.strerror or error}") from None
    except ValueError:
        raise JkvError(f"bundle file {str(path)!r} is damaged: it is no JSON; build the bundle anew") from None
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise JkvError(f"{str(path)!r} is no manifest of a bundle; make one with jkv build")
    made_with = plain.get("made_with")
    found = made_with.get("jkv") if isinstance(made_with, dict) else None
    if plain.get("version") != VERSION or found != __version__:
        raise JkvError(
            f"bundle {str(folder)!r} is stale: {MANIFEST} has format {plain.get('version')} of jkv {found}, and this "
            f"is format {VERSION} of jkv {__version__}; build it anew with jkv build"
        )
    try:
        if not is_sealed(plain):
            raise ValueError
        manifest = from_json(plain)
    except (KeyError, TypeError, ValueError):
        raise JkvError(
            f"bundle file {str(path)!r} is damaged: its checksum does not fit; build the bundle anew"
        ) from None
    for name, checksum in manifest.files.items():
        _checked(folder, name, checksum)
    return Bundle(folder, manifest)


def _checked(folder: Path, name: str, checksum: str) -> bytes:
    """A file's bytes, if they are those that the manifest knows."""
    path = folder / name
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise JkvError(f"bundle file {str(path)!r} cannot be read: {error.strerror or error}") from None
    if hashlib.sha256(raw).hexdigest() != checksum:
        raise JkvError(f"bundle file {str(path)!r} is damaged: its checksum does not fit; build the bundle anew")
    return raw


def _key(facts: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(sorted(facts.items()))
