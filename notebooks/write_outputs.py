"""Runs the notebooks' scripts, and writes them with their outputs beside them.

    python notebooks/write_outputs.py            # on a cluster of its own
    KVLOOM_BASE_URL=… python notebooks/write_outputs.py 03

They are written as ``.py`` (jupytext, percent); the ``.ipynb`` is made here.
"""

import os
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

import kvloom

HERE = Path(__file__).parent
CELL_LIMIT_S = 600


def scripts(wanted: list[str]) -> list[Path]:
    """All of them, or those whose names begin as ``wanted``."""
    found = sorted(HERE.glob("[0-9][0-9]_*.py"))
    return [path for path in found if not wanted or path.name.startswith(tuple(wanted))]


def executed(path: Path) -> nbformat.NotebookNode:
    """A script as a notebook that was run from top to bottom."""
    notebook = jupytext.read(path)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # the same each time
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "name": "python3"}
    NotebookClient(
        notebook, timeout=CELL_LIMIT_S, record_timing=False, coalesce_streams=True
    ).execute()
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def main() -> None:
    """Run what was asked for, one after the other, on one cluster."""
    with kvloom.local_cluster(
        "--dev-endpoints", env={"KVLOOM_DIRECT_TOKENS": "0"}
    ) as cluster:
        os.environ["KVLOOM_BASE_URL"] = cluster.base_url
        os.environ["KVLOOM_MODEL"] = cluster.model
        for path in scripts(sys.argv[1:]):
            began = time.monotonic()
            nbformat.write(executed(path), path.with_suffix(".ipynb"))
            print(f"{path.stem}: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
