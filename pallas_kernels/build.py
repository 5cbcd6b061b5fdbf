"""Compile a lowered kernel with the ``triton`` wheel, for any GPU and on any host: no driver and no device needed.

Pallas hands its Triton IR to the runtime before Triton's first passes, and the wheel skips them for IR files. Here all
stages of the backend run, the first one too, because it folds the zero accumulators that Pallas writes into the dots.
Nothing is cached: the stages run in memory, for AMD in a process for each architecture
(:mod:`pallas_kernels.build_worker`).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

from jkv.errors import JkvError
from pallas_kernels.build_worker import worker_of
from pallas_kernels.lowered import Lowered

# target: (Triton's backend, architecture, threads of a warp, platform to lower for)
TARGETS: dict[str, tuple[str, Any, int, str]] = {
    "sm_90": ("cuda", 90, 32, "cuda"),
    "gfx942": ("hip", "gfx942", 64, "rocm"),
    "gfx950": ("hip", "gfx950", 64, "rocm"),
}
# What a program can have: opted-in shared memory, LDS of a workgroup.
SHARED_BYTES = {"sm_90": 227 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One kernel for one GPU, and what it takes of a multiprocessor (or compute unit)."""

    name: str  # of the function in the binary
    target: str
    assembly: str  # PTX, or AMD GCN assembly
    binary: bytes  # cubin or hsaco
    ir: str  # Triton GPU IR, the last form that still shows tiles
    registers: int  # vector registers a thread; on AMD accumulation registers included
    spills: int  # vector registers a thread that went to memory
    shared_bytes: int
    num_warps: int
    threads: int  # of a program
    parameters: int  # pointers that a launch passes: those of the kernel, then scratch that this release of triton adds


def available() -> bool:
    """Whether the ``triton`` wheel is installed."""
    return importlib.util.find_spec("triton") is not None


def version() -> tuple[int, int]:
    """Major and minor version of the ``triton`` package."""
    major, minor = importlib.metadata.version("triton").split(".")[:2]
    return int(major), int(minor)


def platform_of(target: str) -> str:
    """The platform that :func:`pallas_kernels.compat.lower` takes for ``target``: ``"cuda"`` or ``"rocm"``.

    Raises:
      JkvError: for an unknown target.
    """
    if target not in TARGETS:
        raise JkvError(f"target={target!r} is unknown; target must be one of {', '.join(TARGETS)}")
    return TARGETS[target][3]


def compile(lowered: Lowered, target: str, options: Mapping[str, Any] | None = None) -> Compiled:
    """Compile ``lowered`` for ``target`` (``"sm_90"``, ``"gfx942"`` or ``"gfx950"``).

    ``lowered`` must come from the target's own platform. ``options`` are further options of Triton's backend, those
    that Pallas cannot express (``maxnreg``, ``waves_per_eu``).

    Raises:
      JkvError: where triton is not installed, the target is unknown, the compiler rejects the kernel, or it
        takes more shared memory than the target has.
    """
    if platform_of(target) == "cuda":
        return compile_here(lowered, target, options)
    _check_available()
    compiled: Compiled = worker_of(target).compile(lowered, target, options or {})
    return compiled


def compile_here(lowered: Lowered, target: str, options: Mapping[str, Any] | None = None) -> Compiled:
    """What :func:`compile` does, in this process, which for AMD must not have compiled for another architecture."""
    _check_available()
    backend_name, arch, threads, _ = TARGETS[target]

    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget, Language
    from triton.compiler.compiler import make_backend

    gpu = GPUTarget(backend_name, arch, threads)
    backend = make_backend(gpu)
    wanted = {"num_warps": lowered.num_warps, "num_stages": lowered.num_stages, "enable_fp_fusion": True}
    parsed = backend.parse_options(wanted | dict(options or {}))
    metadata: dict[str, Any] = {"target": gpu, **parsed.__dict__}
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed, Language.TRITON)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    forms: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.ttir")
        path.write_text(_spelled(lowered.text, version()))
        try:
            module = ir.parse_mlir_module(str(path), context)
            module.context = context
            for stage, run in stages.items():
                module = run(module, metadata)
                forms[stage] = module if isinstance(module, bytes) else str(module)
        except Exception as error:
            raise JkvError(f"triton cannot compile {lowered.name} for {target}: {error}") from error
        assembly = forms["ptx" if backend_name == "cuda" else "amdgcn"]
        binary = forms["cubin" if backend_name == "cuda" else "hsaco"]
        registers, spills = _usage_nvidia(binary, folder) if backend_name == "cuda" else _usage_amd(assembly)
    num_warps, shared = int(metadata["num_warps"]), int(metadata["shared"])
    if shared > SHARED_BYTES[target]:
        raise JkvError(
            f"{lowered.name} takes {shared} bytes of shared memory; a program on {target} has {SHARED_BYTES[target]}"
        )
    return Compiled(
        name=str(metadata.get("name", lowered.name)),
        target=target,
        assembly=assembly,
        binary=binary,
        ir=forms["ttgir"],
        registers=registers,
        spills=spills,
        shared_bytes=shared,
        num_warps=num_warps,
        threads=num_warps * threads,
        parameters=_parameters(assembly, backend_name),
    )


def _check_available() -> None:
    if not available():
        raise JkvError("compiling needs the triton package, which is not installed: pip install 'triton>=3.6'")


def _spelled(text: str, triton: tuple[int, int]) -> str:
    """Triton IR with the hints of its loads and stores as this release of Triton spells them (3.9 changed that)."""
    if triton >= (3, 9):
        new = r" {cachePolicy = #tt.cache_policy<cache_modifier = none, eviction_policy = \1>}"
        return re.sub(r" evictionPolicy = (\w+)", new, text)
    old = r" \{cachePolicy = #tt\.cache_policy<cache_modifier = none, eviction_policy = (\w+)>\}"
    return re.sub(old, r" evictionPolicy = \1", text)


def sass(compiled: Compiled) -> str:
    """Machine instructions of a kernel for sm_90, as ``nvdisasm`` prints them."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.cubin")
        path.write_bytes(compiled.binary)
        return _tool("nvdisasm", "-c", "-plr", str(path))


def _parameters(assembly: str, backend: str) -> int:
    if backend == "cuda":
        header = assembly[assembly.index(".entry") : assembly.index("{", assembly.index(".entry"))]
        return len(re.findall(r"^\s*\.param\s", header, re.MULTILINE))
    return len(re.findall(r"^\s*(?:- )?\.value_kind:\s+global_buffer", assembly, re.MULTILINE))


def _usage_nvidia(cubin: bytes, folder: str) -> tuple[int, int]:
    path = pathlib.Path(folder, "kernel.cubin")
    path.write_bytes(cubin)
    text = _tool("cuobjdump", "-res-usage", str(path))
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise JkvError(f"cuobjdump reports no registers: {text.strip()!r}")
    return int(found[1]), int(found[2]) // 4


def _usage_amd(assembly: str) -> tuple[int, int]:
    found = dict(re.findall(r"^\s*\.(vgpr_count|vgpr_spill_count):\s*(\d+)", assembly, re.MULTILINE))
    return int(found["vgpr_count"]), int(found["vgpr_spill_count"])


def _tool(name: str, *arguments: str) -> str:
    import triton.backends.nvidia

    path = pathlib.Path(triton.backends.nvidia.__file__).parent / "bin" / name
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout
