"""The notebooks as they are stored: their scripts' code, and outputs to be read."""

import json
import re
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest
from readme import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 120_000
"""Small enough to look at in a review."""


def stored(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def test_all_four_are_there_and_listed() -> None:
    """Each script has its notebook, and the overview has them all."""
    scripts = sorted((ROOT / "notebooks").glob("[0-9]*.py"))
    assert [path.stem for path in NOTEBOOKS] == [path.stem for path in scripts]
    overview = (ROOT / "notebooks" / "README.md").read_text()
    linked = re.findall(r"\]\((\w+\.ipynb)\)", overview)
    assert linked == [path.name for path in NOTEBOOKS]
    assert len(linked) == 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestStored:
    """One notebook."""

    def test_it_is_its_script(self, path: Path) -> None:
        """Cell by cell (`python notebooks/write_outputs.py`)."""
        script = jupytext.read(path.with_suffix(".py"))
        cells = [(cell.cell_type, cell.source) for cell in stored(path).cells]
        assert cells == [(cell.cell_type, cell.source) for cell in script.cells]
        nbformat.validate(stored(path))

    def test_it_was_run_from_top_to_bottom(self, path: Path) -> None:
        """In one go, without an error or a warning, and it shows something."""
        code = [cell for cell in stored(path).cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
        outputs = [output for cell in code for output in cell.outputs]
        assert outputs
        for output in outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr", output

    def test_it_starts_a_cluster_first_and_stops_it_last(self, path: Path) -> None:
        """A reader needs to prepare nothing, and leaves nothing running."""
        code = [c.source for c in stored(path).cells if c.cell_type == "code"]
        assert "kvloom.local_cluster(" in code[0]
        assert code[-1] == "stack.close()"

    def test_its_outputs_name_no_machine(self, path: Path) -> None:
        """No path, no address, no handle; and its pictures are small."""
        assert path.stat().st_size < MAX_BYTES
        notebook = stored(path)
        said = json.dumps([c.get("outputs", []) for c in notebook.cells])
        said = re.sub(r'"image/png": "[^"]*"', "", said)
        for pattern in (
            r"/(?:tmp|home|root|usr|work|Users)\b",
            r"127\.0\.0\.1",
            "kvl1",
        ):
            assert not re.search(pattern, said), pattern
        assert set(notebook.metadata) <= {"kernelspec", "language_info", "jupytext"}

    def test_its_links_lead_somewhere(self, path: Path) -> None:
        """To other notebooks, beside it."""
        prose = "".join(c.source for c in stored(path).cells if c.cell_type != "code")
        for target in re.findall(r"\]\(([^)]+)\)", prose):
            assert (path.parent / target).exists(), target
