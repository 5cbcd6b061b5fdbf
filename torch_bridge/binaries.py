"""Triton IR to a binary for one GPU, kept on disk: compiling takes seconds, and a process restarts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import platformdirs

from jkv.errors import JkvError
from pallas_kernels import build
from pallas_kernels.lowered import Lowered


@dataclasses.dataclass(frozen=True)
class Binary:
    """What a launch needs of a compiled kernel; ``parameters`` are pointers, hidden ones included."""

    entry: str
    image: bytes
    threads: int
    shared_bytes: int
    parameters: int


def cache_folder() -> Path:
    """Where binaries are kept, by the conventions of the system."""
    return Path(platformdirs.user_cache_dir("jkv")) / "kernels"


def binary_of(lowered: Lowered, target: str, folder: Path | None = None) -> Binary:
    """``lowered`` compiled for ``target``, from ``folder`` where it was compiled before.

    What is damaged there is compiled again. Two processes may compile the same kernel; either's file will do.

    Raises:
      JkvError: as :func:`pallas_kernels.build.compile`, for an unknown target or a missing compiler, say.
    """
    folder = folder or cache_folder()
    path = folder / f"{_key(lowered, target)}.bin"
    found = _read(path)
    if found is None:
        compiled = build.compile(lowered, target)
        found = Binary(compiled.name, compiled.binary, compiled.threads, compiled.shared_bytes, compiled.parameters)
        _write(path, found)
    return found


def _key(lowered: Lowered, target: str) -> str:
    if not build.available():
        raise JkvError(
            f"{lowered.name} must be compiled for {target}, and triton is not installed: pip install 'triton>=3.6', or "
            "use a bundle with binaries for this GPU"
        )
    release = ".".join(map(str, build.version()))
    parts = (target, release, str(lowered.num_warps), str(lowered.num_stages), lowered.text)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _read(path: Path) -> Binary | None:
    """A file is a line of JSON, with a checksum, and the image."""
    try:
        header, _, image = path.read_bytes().partition(b"\n")
        facts = json.loads(header)
        if facts.pop("sha256") != hashlib.sha256(image).hexdigest():
            return None
        return Binary(image=image, **facts)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _write(path: Path, binary: Binary) -> None:
    """Complete or not at all. A cache that cannot be written is no cache, and no error."""
    facts: dict[str, Any] = dataclasses.asdict(binary)
    image = facts.pop("image")
    header = json.dumps(facts | {"sha256": hashlib.sha256(image).hexdigest()}).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(header + b"\n" + image)
        os.replace(name, path)
    except OSError:
        return
