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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--optimized",
        action="store_true",
        help="let XLA optimize what it compiles, as for users: a fifth slower",
    )


@pytest.fixture(autouse=True, scope="session")
def _compile_quickly(request: pytest.FixtureRequest) -> None:
    """Most functions here run once, and compiling them takes the time. Kernels for a GPU are another matter."""
    quick = not request.config.getoption("--optimized") and jax.default_backend() == "cpu"
    jax.config.update("jax_disable_most_optimizations", quick)


@pytest.fixture(scope="session")
def demo_model():
    """The demo model, fetched on first use; a test that takes it carries `@pytest.mark.demo`."""
    from jkv.models.load import load

    return load("demo")
