"""The engine tests share one real prefill/decode pair, started as a user does."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pair import Pair
from shelf import Shelf

# A decode engine so small that five short conversations fill it.
SMALL = (
    "--decode-arg=--num-gpu-blocks-override=110",
    "--decode-arg=--max-model-len=3200",
)
EXACT = "--engine-arg=--dtype=float32"


SHARING = (
    (
        "bench_reuse",
        "endpoints",
        "never_stuck",
        "return_modes",
        "right_answers",
        "soak",
    ),
    ("examples", "notebooks", "standard_suite"),
)
"""Files whose tests use the same cluster, which starts once if they run in a row."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs a real engine."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            item.add_marker(pytest.mark.engine)
    items.sort(key=lambda item: _cluster_of(item.path, here))


def _cluster_of(file: Path, here: Path) -> int:
    name = file.stem.removeprefix("test_") if file.parent == here else ""
    sharing = (n for n, names in enumerate(SHARING) if name in names)
    return next(sharing, len(SHARING))


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    """Where clusters stand; empty again at the end."""
    kept = Shelf(tmp_path_factory.mktemp("clusters"))
    try:
        yield kept
    finally:
        kept.clear()


@pytest.fixture
def pair(shelf: Shelf) -> Iterator[Pair]:
    """One prefill engine and one small decode engine behind the router.

    In float32, so that KV computed in pieces equals KV computed in one go. At
    the end of each test no lease is left and no block is held.
    """
    running = shelf.up(EXACT, *SMALL, "--dev-endpoints")
    with Pair(running) as opened:
        yield opened
        opened.release_all()
        opened.assert_nothing_is_held()
