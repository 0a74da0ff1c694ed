"""The examples on a real pair: a reader's first runs."""

import re
from pathlib import Path

import examples
import pytest
from shelf import Running, Shelf


@pytest.fixture
def running(shelf: Shelf) -> Running:
    """The cluster that the walkthroughs run on, too."""
    return shelf.up("--dev-endpoints")


@pytest.mark.parametrize("example", examples.PROGRAMS, ids=lambda e: e.name)
def test_an_example_runs_and_says_what_was_reused(
    example: examples.Example,
    running: Running,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    """From start to end, without a change, and the router took part."""
    printed = examples.run(
        example,
        request.config,
        base_url=running.base_url,
        model=running.model,
        folder=tmp_path,
    )
    assert re.search(r"'plan': |prompt tokens", printed)
