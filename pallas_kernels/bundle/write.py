"""Make a bundle: lower everything, in several processes, and put it in place in one piece."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from jkv._version import __version__
from jkv.errors import JkvError
from pallas_kernels import build
from pallas_kernels.bundle.format import MANIFEST, TABLES, Image, Kernel, Manifest, Variant, seal, to_json
from pallas_kernels.bundle.kernels import Made, make
from pallas_kernels.bundle.request import Job, Request, jobs_of

Progress = Callable[[int, int, str], None]
_JOBS_A_PROCESS = 32  # at least: another process imports JAX first, which takes as long


@dataclasses.dataclass(frozen=True)
class _Done:
    """What became of one job: its entry, and files by name."""

    kernel: Kernel
    files: Mapping[str, bytes]
    tables: Mapping[str, np.ndarray]


def write_bundle(
    request: Request,
    folder: str | Path,
    *,
    binary: bool = False,
    assembly: bool = False,
    processes: int | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Lower what was asked for into ``folder``; a bundle that is there is replaced whole or not at all.

    ``binary`` and ``assembly`` compile each text for its targets, which takes longer than all else.

    Raises:
      JkvError: for a folder that is no bundle or cannot be written, a scheme that has no kernels at some head_dim, or
        a missing compiler.
    """
    return write_jobs(jobs_of(request), folder, binary, assembly, processes, progress)


def write_jobs(
    jobs: list[Job],
    folder: str | Path,
    binary: bool = False,
    assembly: bool = False,
    processes: int | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """What :func:`write_bundle` does, for some kernels."""
    folder = Path(folder)
    _check_place(folder)
    if (binary or assembly) and not build.available():
        raise JkvError(
            "binaries and assembly need the triton package, which is not installed: pip install 'triton>=3.6'"
        )
    done: list[_Done] = []
    for number, result in enumerate(_run(jobs, binary, assembly, processes), 1):
        done.append(result)
        if progress:
            progress(number, len(jobs), " ".join(filter(None, (result.kernel.op, result.kernel.facts.get("spec")))))
    with _replacing(folder) as part:
        return _write(part, done, compiled=binary or assembly)


def _run(jobs: list[Job], binary: bool, assembly: bool, processes: int | None) -> Iterator[_Done]:
    count = min(processes or os.cpu_count() or 1, -(-len(jobs) // _JOBS_A_PROCESS))
    if count <= 1:
        for job in jobs:
            yield _one(job, binary, assembly)
        return
    # Workers lower for other devices and need none: they must not take a GPU's memory.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(count, context, _worker) as pool:
        yield from pool.map(_one, jobs, [binary] * len(jobs), [assembly] * len(jobs), chunksize=4)


def _worker() -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")


def _one(job: Job, binary: bool, assembly: bool) -> _Done:
    made = make(job.op, job.facts, job.targets[0])
    files = {file: lowered.text.encode() for file, lowered in made.texts.items()}
    variants = made.kernel.variants
    if binary or assembly:
        variants = tuple(_compiled(made, variant, job.targets, files, binary, assembly) for variant in variants)
    return _Done(dataclasses.replace(made.kernel, targets=job.targets, variants=variants), files, made.tables)


def _compiled(
    made: Made, variant: Variant, targets: tuple[str, ...], files: dict[str, bytes], binary: bool, assembly: bool
) -> Variant:
    """A variant with what the compiler makes of it; the files are added to ``files``."""
    images, texts = {}, {}
    stem = Path(variant.file).stem
    for target in targets:
        compiled = build.compile(made.texts[variant.file], target)
        nvidia = build.platform_of(target) == "cuda"
        if binary:
            file = f"bin/{stem}.{target}.{'cubin' if nvidia else 'hsaco'}"
            files[file] = compiled.binary
            images[target] = Image(file, compiled.name, compiled.threads, compiled.shared_bytes, compiled.parameters)
        if assembly:
            texts[target] = f"asm/{stem}.{target}.{'ptx' if nvidia else 'amdgcn'}"
            files[texts[target]] = compiled.assembly.encode()
    return dataclasses.replace(variant, images=images, assembly=texts)


def _write(folder: Path, done: list[_Done], compiled: bool) -> Manifest:
    sums = {}
    tables: dict[str, np.ndarray] = {}
    for result in done:
        tables |= result.tables
        for name, raw in result.files.items():
            if name not in sums:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(raw)
                sums[name] = hashlib.sha256(raw).hexdigest()
    with (folder / TABLES).open("wb") as file:
        np.savez(file, **tables)  # type: ignore[arg-type]
    sums[TABLES] = hashlib.sha256((folder / TABLES).read_bytes()).hexdigest()
    packages = ("jax", "jaxlib", "triton") if compiled else ("jax", "jaxlib")
    versions = {"jkv": __version__} | {name: importlib.metadata.version(name) for name in packages}
    manifest = Manifest(versions, tuple(result.kernel for result in done), dict(sorted(sums.items())))
    (folder / MANIFEST).write_text(json.dumps(seal(to_json(manifest))))
    return manifest


def _check_place(folder: Path) -> None:
    if folder.exists() and not (folder / MANIFEST).is_file() and not (folder.is_dir() and not any(folder.iterdir())):
        raise JkvError(f"{str(folder)!r} exists and is no bundle; give a folder that is new, empty or a bundle")
    if not folder.absolute().parent.is_dir():
        raise JkvError(f"{str(folder)!r} cannot be made: folder {str(folder.absolute().parent)!r} does not exist")


@contextlib.contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A folder to fill that becomes ``folder`` at the end; what goes wrong on the way leaves nothing behind."""
    folder = folder.absolute()
    try:
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
            part = Path(scratch, "new")
            part.mkdir()
            yield part
            if folder.exists():
                folder.rename(Path(scratch, "old"))
            part.rename(folder)
            shutil.rmtree(Path(scratch, "old"), ignore_errors=True)
    except OSError as error:
        raise JkvError(f"{str(folder)!r} cannot be written: {error.strerror or error}") from None
