"""Where kernels are interpreted, most of the time goes into XLA's compilation of what runs once: it may be careless."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

from tests.pallas_kernels.devices import INTERPRET


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly() -> Iterator[None]:
    """In these modules only: the core, which people run on CPUs, is tested as they compile it."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", INTERPRET or before)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
