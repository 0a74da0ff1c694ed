"""The notebooks, and how a test runs them: on fake engines or on real ones."""

import sys
from pathlib import Path

import jupytext
import nbformat
from programs import ran
from readme import ROOT

SCRIPTS = sorted((ROOT / "notebooks").glob("[0-9]*.py"))
CELL_LIMIT_S = 300


def run_all(*, base_url: str, model: str, folder: Path) -> None:
    """All of them from top to bottom, through nbmake; none may fail.

    Run is what is written in the scripts; that the stored notebooks are the same
    has a test of its own.
    """
    for script in SCRIPTS:
        nbformat.write(jupytext.read(script), folder / f"{script.stem}.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbmake", "-q"]
    command += [f"--nbmake-timeout={CELL_LIMIT_S}", "-p", "no:cacheprovider"]
    printed = ran(
        [*command, f"--rootdir={folder}", str(folder)],
        base_url=base_url,
        model=model,
        folder=folder,
    )
    assert f"{len(SCRIPTS)} passed" in printed
