"""Environments beside the project's own, for what cannot be in the same one.

Each is made from PyPI once and kept in pytest's cache. Without PyPI the test is
skipped, unless ``CI`` is set.
"""

import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest


def interpreter(config: pytest.Config, name: str, needs: Sequence[str]) -> Path:
    """The Python of the environment ``name``, which has ``needs``."""
    assert config.cache is not None
    home = Path(config.cache.mkdir(name))
    python, stamp = home / "bin" / "python", home / "needs"
    wanted = " ".join((sys.version, *needs))
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    venv.create(home, clear=True)
    pip = [sys.executable, "-m", "pip", "--python", python, "install"]
    pip += ["--quiet", "--no-compile", "--retries=1", *needs]
    made = subprocess.run(pip, capture_output=True, text=True, check=False)
    if made.returncode != 0 and "CI" not in os.environ:
        pytest.skip(f"PyPI cannot be reached: {made.stderr.strip()[-200:]}")
    assert made.returncode == 0, made.stderr
    stamp.write_text(wanted)
    return python
