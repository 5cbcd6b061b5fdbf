"""What this machine can do: versions, devices, kernels, what is missing and how to get it.

`report` looks and returns a plain dict, `render` prints one. Looking never downloads, never imports torch or vllm and
never fails: what cannot be found out is reported as such.
"""

import importlib.util
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jkv._version import __version__

__all__ = ["render", "report"]

PYTHON = ">=3.11"
REQUIRED = {
    "jax": ">=0.10.2,<0.13",
    "jaxlib": ">=0.10.2,<0.13",
    "flax": ">=0.12",
    "numpy": ">=2.0",
    "ml_dtypes": ">=0.5",
    "optax": ">=0.2.4",
    "chex": ">=0.1.90",
    "safetensors": ">=0.5",
    "tokenizers": ">=0.21",
    "gguf": ">=0.17",
    "typer": ">=0.15",
    "rich": ">=13.9",
    "matplotlib": ">=3.9",
    "platformdirs": ">=4.2",
    "packaging": ">=23",
}
"""The dependencies of pyproject.toml (a test compares them), known here so that a bare checkout can be examined too."""

OPTIONAL = {
    "torch": ("the torch bridge; comparing logits with transformers", "pip install 'jkv-cache[torch]'"),
    "triton": ("kernels on torch's stream (Linux; CUDA builds of torch bring it)", "pip install triton"),
    "vllm": ("serving with a jkv scheme (Linux with a GPU)", "pip install 'jkv-cache[vllm]'"),
    "transformers": ("comparing models in the tests", "pip install transformers"),
}

NO_KERNELS = "reference only (jax.numpy); GPU kernels are not in this version"


def report() -> dict[str, Any]:
    """Everything `jkv doctor` knows; only strings, numbers, booleans, None, lists and dicts, so it can go into JSON."""
    packages = [_package(name, wanted) for name, wanted in REQUIRED.items()]
    python = platform.python_version()
    python_ok = python in SpecifierSet(PYTHON, prereleases=True)
    devices, device_problem = _devices()
    kernels = _kernels()

    problems = []
    if not python_ok:
        problems.append(f"Python {python} is outside {PYTHON}: make the virtual environment with a newer one")
    problems += [f"{_complaint(p)}: {p['get']}" for p in packages if not p["ok"]]
    if device_problem:
        problems.append(device_problem)
    unused = _unused_gpu(devices)
    if unused:
        problems.append(unused)
    return {
        "jkv": __version__,
        "python": {"version": python, "supported": PYTHON, "ok": python_ok, "executable": sys.executable},
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": _memory(),
        "packages": packages,
        "optional": [_optional(name, use, get) for name, (use, get) in OPTIONAL.items()],
        "devices": devices,
        "kernels": kernels,
        "demo_model": _demo_model(),
        "problems": problems,
        "ok": not problems,
    }


def render(found: dict[str, Any], console: Console | None = None) -> None:
    """Print a report for people, problems last."""
    console = console or Console()
    python = found["python"]
    console.print(f"[bold]jkv {found['jkv']}[/] on Python {python['version']}, {escape(found['platform'])}")
    console.print(f"{found['cpu_count']} CPUs, {_size(found['memory_bytes'])} of memory\n")

    table = Table("package", "version", "supported", "", title="Packages", title_justify="left", box=None)
    for p in found["packages"]:
        table.add_row(p["name"], p["version"] or "missing", escape(p["supported"]), _mark(p["ok"]))
    console.print(table, "")

    table = Table("package", "version", "used for", "how to get it", title="Optional", title_justify="left", box=None)
    for p in found["optional"]:
        table.add_row(p["name"], p["version"] or "missing", p["for"], "" if p["version"] else escape(p["get"]))
    console.print(table, "")

    table = Table("id", "platform", "kind", "memory", title="Devices", title_justify="left", box=None)
    for d in found["devices"]:
        table.add_row(str(d["id"]), d["platform"], escape(d["kind"]), _size(d["memory_bytes"]))
    console.print(table, "")

    console.print(f"[bold]Kernels[/]     {escape(found['kernels']['summary'])}")
    demo = found["demo_model"]
    where = f"cached at {demo['path']}" if demo["cached"] else f"not here yet; {demo['get']}"
    console.print(f"[bold]Demo model[/]  {demo['name']}: {escape(where)}", soft_wrap=True)
    if found["ok"]:
        console.print("\n[green]Nothing is missing for the core.[/]")
    for problem in found["problems"]:
        console.print(f"[red]problem[/] {escape(problem)}", soft_wrap=True)


def _mark(ok: bool) -> str:
    return "[green]ok[/]" if ok else "[red]not supported[/]"


def _size(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"


def _version(name: str) -> str | None:
    """The installed version without importing the package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _package(name: str, wanted: str) -> dict[str, Any]:
    version = _version(name)
    ok = version is not None and SpecifierSet(wanted, prereleases=True).contains(version)
    return {"name": name, "version": version, "supported": wanted, "ok": ok, "get": f"pip install '{name}{wanted}'"}


def _optional(name: str, use: str, get: str) -> dict[str, Any]:
    version = _version(name)
    if version is None and _importable(name):
        version = "unknown"
    return {"name": name, "version": version, "for": use, "get": get}


def _complaint(package: dict[str, Any]) -> str:
    if package["version"] is None:
        return f"{package['name']} is missing"
    return f"{package['name']} {package['version']} is outside {package['supported']}"


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _memory() -> int | None:
    """Bytes of main memory, where the system tells."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _devices() -> tuple[list[dict[str, Any]], str | None]:
    """What jax sees by default, and a sentence where it fails."""
    try:
        import jax

        devices = jax.devices()
    except Exception as error:  # a broken driver or plugin may raise anything; the doctor has to survive it
        return [], f"jax finds no device: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    found = []
    for device in devices:
        try:
            memory = (device.memory_stats() or {}).get("bytes_limit")
        except Exception:  # not every backend implements it
            memory = None
        if memory is None and device.platform == "cpu":
            memory = _memory()
        found.append({"id": device.id, "platform": device.platform, "kind": device.device_kind, "memory_bytes": memory})
    return found, None


def _unused_gpu(devices: list[dict[str, Any]]) -> str | None:
    """A sentence when the system has a GPU driver and jax has no GPU."""
    if any(d["platform"] not in ("cpu", "tpu") for d in devices):
        return None
    if Path("/dev/nvidiactl").exists():
        return f"an NVIDIA GPU is here but jax does not see it: pip install 'jax[cuda12]{REQUIRED['jax']}'"
    if Path("/dev/kfd").exists():
        return f"an AMD GPU is here but jax does not see it: pip install 'jax[rocm7-local]{REQUIRED['jax']}'"
    return None


def _kernels() -> dict[str, Any]:
    if not _importable("pallas_kernels"):
        return {"pallas_kernels": False, "summary": NO_KERNELS}
    return {"pallas_kernels": True, "summary": "Pallas kernels importable (pallas_kernels), reference in jax.numpy"}


def _demo_model() -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": "SmolLM2-135M-Instruct",
        "cached": False,
        "path": None,
        "get": "jkv compare fetches it once (93 MB) and works offline afterwards",
    }
    try:
        from jkv.models.demo import FILE_NAME, default_cache_dir

        path = default_cache_dir() / FILE_NAME
        if path.is_file():
            found |= {"cached": True, "path": str(path)}
    except (ImportError, OSError) as error:  # the loader's own troubles are for the commands that load
        found["get"] = f"cannot look for it: {error}"
    return found
