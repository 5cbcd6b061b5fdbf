"""Which tests wait for a GPU, or need a compiler."""

from __future__ import annotations

import jax
import pytest

from pallas_kernels import build

INTERPRET = jax.default_backend() != "gpu"
on_gpu = pytest.mark.skipif(INTERPRET, reason="a further shape of a kernel: quick on a GPU, minutes to interpret")
needs_triton = pytest.mark.skipif(not build.available(), reason="compiling needs the triton package (Linux only)")
