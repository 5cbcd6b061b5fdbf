"""A backend without a GPU: kernels are lowered, and launched by a driver that does nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pallas_kernels import build
from tests.torch_bridge.fake_driver import FakeDriver
from torch_bridge.launch import Library
from torch_bridge.launched.backend import LaunchedBackend
from torch_bridge.lowering import Lowering


@contextlib.contextmanager
def fake_backend(folder: Path) -> Iterator[tuple[LaunchedBackend, FakeDriver]]:
    """On the CPU; what the kernels would compute is not."""

    def compile(lowered, target: str) -> build.Compiled:
        return build.Compiled(lowered.name, target, "", b"", "", 1, 0, 0, 4, 128, lowered.text.count("!tt.ptr"))

    driver = FakeDriver()
    with pytest.MonkeyPatch.context() as stubs:
        for name, stub in (("compile", compile), ("available", lambda: True), ("version", lambda: (3, 6))):
            stubs.setattr(build, name, stub)
        library = Library(
            Lowering(folder), torch.device("cpu"), cache=folder / "binaries", driver=driver, target="sm_90"
        )
        yield LaunchedBackend(library, 132, lambda: 0), driver
