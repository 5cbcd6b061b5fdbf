"""Which tests wait for a GPU."""

from __future__ import annotations

import jax
import pytest

INTERPRET = jax.default_backend() != "gpu"
on_gpu = pytest.mark.skipif(INTERPRET, reason="a further shape of a kernel: quick on a GPU, minutes to interpret")
