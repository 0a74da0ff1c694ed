"""What the end-to-end tests share."""

import pytest


@pytest.fixture(params=["pull", "push"])
def transfer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which decode may learn that a prompt's KV is ready."""
    # The SDK's tests also run where no server is installed.
    from e2e.test_router_stage import SETTINGS

    how: str = request.param
    monkeypatch.setitem(SETTINGS, "transfer", how)
    return how
