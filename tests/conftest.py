"""What holds for every test."""

import pytest
from hypothesis import settings

# Times are the benchmarks'; a loaded machine is no failure.
settings.register_profile("kvloom", deadline=None)
settings.load_profile("kvloom")


@pytest.fixture
def anyio_backend() -> str:
    """The loop of asynchronous tests: the router's. Where trio is installed they
    would otherwise run in both."""
    return "asyncio"
