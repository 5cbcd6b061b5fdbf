"""Kernels on one device by operation and setting, launched on torch's current stream; no JAX in the process.

::

    library = Library(load_bundle("kernels.jkv"), torch.device("cuda", 0))
    split = library.kernel("split", spec="kivi:bits=2", head_dim=128, num_kv_heads=8, gqa=4)
    sizes = {"batch": 32, "splits": 16, "width": 512, "blocks": 16384}
    split = split.bind({"pool": pool, "sizes": library.sizes(sizes)})
    split.launch(sizes, *tensors)  # those of split.names, in that order

A library is made before a CUDA graph is captured, and so are its kernels: that is when binaries are loaded and memory
is taken. A launch takes none and waits for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from jkv.errors import JkvError
from pallas_kernels import build
from pallas_kernels.bundle.facts import OPS, Facts, codec_spec
from pallas_kernels.bundle.format import Kernel, Variant
from pallas_kernels.lowered import BLOCKS, COUNT, LENGTH, PLACES, POOL, SPLITS, Lowered
from torch_bridge.binaries import Binary, binary_of
from torch_bridge.driver import Driver, target_of
from torch_bridge.driver import driver as installed_driver
from torch_bridge.function import Function
from torch_bridge.launcher import Launcher

_PLACES = {"width": BLOCKS, "splits": SPLITS, "pages": COUNT, "tokens": COUNT, "blocks": POOL, "places": PLACES}


class KernelSource(Protocol):
    """Where kernels come from: a bundle on disk, or :class:`torch_bridge.lowering.Lowering`."""

    def kernel(self, op: str, facts: Facts, target: str) -> Kernel: ...

    def text(self, kernel: Kernel, variant: Variant) -> Lowered: ...

    def image(self, variant: Variant, target: str) -> bytes | None: ...

    def table(self, name: str) -> np.ndarray: ...


class Library:
    """The kernels of a source on one device, each made once.

    ``cache`` is the folder of compiled binaries, the user's by default. ``driver`` and ``target`` are the device's own
    unless a test gives others.

    Raises:
      JkvError: where there is no driver, or the device is of an architecture that has no kernels.
    """

    def __init__(
        self,
        source: KernelSource,
        device: torch.device | str | int,
        *,
        cache: Path | None = None,
        driver: Driver | None = None,
        target: str | None = None,
    ):
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self._driver = driver or installed_driver()
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", self._driver.current())
        self.target = target or target_of(self.device)
        if self.target not in build.TARGETS:
            raise JkvError(
                f"device {self.device} is of architecture {self.target}, which has no kernels; there are some for "
                f"{', '.join(build.TARGETS)}"
            )
        self._source, self._cache = source, cache
        self._kernels: dict[tuple[str, Facts], Launcher] = {}
        self._sizes: dict[tuple[int, ...], Tensor] = {}
        self._rows: dict[tuple[int, int], Tensor] = {}
        self._lock = threading.Lock()

    def kernel(self, op: str, *, layout: str | None = None, **facts: Any) -> Launcher:
        """One operation for one setting, ready to launch: compiled or read from disk, and loaded.

        Args:
          layout: digest of the pages that it shall read (:func:`pallas_kernels.bundle.facts.layout_digest`); others
            are refused.
          facts: fields of :class:`pallas_kernels.bundle.facts.Attention`, ``Writing`` or ``Appending``. A spec may
            state windows; they are not looked at, ``tail`` and ``sinks`` are.

        Raises:
          JkvError: where the source has no such kernel, or it cannot be compiled or loaded.
        """
        if op not in OPS:
            raise JkvError(f"op={op!r} is unknown; it must be one of {', '.join(OPS)}")
        try:
            wanted = OPS[op](**facts | ({"spec": codec_spec(facts["spec"])} if "spec" in facts else {}))
        except TypeError as error:
            raise JkvError(f"the facts of {op!r} do not fit: {error}") from None
        with self._lock:
            found = self._kernels.get((op, wanted))
            if found is None:
                found = self._kernels[op, wanted] = self._make(op, wanted)
        if layout not in (None, found.kernel.layout):
            raise JkvError(
                f"{op!r} of {facts.get('spec')!r} reads pages of layout {found.kernel.layout}, not {layout}; build the "
                "bundle anew"
            )
        return found

    def sizes(self, sizes: Mapping[str, int]) -> Tensor:
        """The operand ``sizes``: ``width`` (entries of a row of the block table), ``splits``, ``tokens`` or ``pages``,
        ``blocks`` of the pool, beyond which no kernel reads or writes, and ``places``, rings that rows choose from.

        Equal sizes share one tensor, which is to be made before a CUDA graph is captured.
        """
        values = [0] * LENGTH
        for name, place in _PLACES.items():
            values[place] = sizes.get(name, values[place])
        key = tuple(values)
        found = self._sizes.get(key)
        if found is None:
            found = self._sizes[key] = torch.tensor([values], dtype=torch.int32, device=self.device)
        return found

    def rows_of(self, value: int, count: int) -> Tensor:
        """``int32[count]`` of one value, shared by those who ask; to be made before a CUDA graph is captured, too."""
        found = self._rows.get((value, count))
        if found is None:
            found = torch.full((count,), value, dtype=torch.int32, device=self.device)
            self._rows[value, count] = found
        return found

    def is_current(self) -> bool:
        """Whether its device is this thread's current one."""
        return self._driver.current() == (self.device.index or 0)

    def _make(self, op: str, facts: Facts) -> Launcher:
        kernel = self._source.kernel(op, facts, self.target)
        functions = [Function(self._binary(kernel, variant), self._driver, self.device) for variant in kernel.variants]
        tables = {
            argument.name: torch.from_numpy(self._source.table(argument.name)).to(self.device, copy=True)
            for argument in kernel.arguments
            if argument.role == "table"
        }
        return Launcher(kernel, functions, self.device).bind(tables)

    def _binary(self, kernel: Kernel, variant: Variant) -> Binary:
        image = self._source.image(variant, self.target)
        if image is None:
            return binary_of(self._source.text(kernel, variant), self.target, self._cache)
        facts = variant.images[self.target]
        return Binary(facts.entry, image, facts.threads, facts.shared_bytes, facts.parameters)
