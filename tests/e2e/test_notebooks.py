"""The walkthroughs in ``notebooks/``, on fake engines."""

from pathlib import Path

from e2e.served import served
from walkthroughs import run_all


def test_the_notebooks_run_from_top_to_bottom(tmp_path: Path) -> None:
    """Whatever they print is the fakes'; that nothing in them fails is not."""
    with served(settings={"direct_tokens": 0}) as here:
        run_all(base_url=here.base_url, model=here.model, folder=tmp_path)
