"""What the tests share: hypothesis profiles, float32 everywhere, the demo model."""

import os

import jax
import pytest
from hypothesis import HealthCheck, settings

jax.config.update("jax_enable_x64", False)

# Compilation makes the first example slow, so no deadline; on CI the examples are the same every time.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(scope="session")
def demo_model():
    """The demo model, fetched on first use; a test that takes it carries `@pytest.mark.demo`."""
    from jkv.models.load import load

    return load("demo")
