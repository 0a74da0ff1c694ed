"""Programs of a reader's, run as he runs them: in a process of their own."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from readme import ROOT


def ran(
    command: Sequence[str | Path], *, base_url: str, model: str, folder: Path
) -> str:
    """What a program prints that is to use this cluster; it must end well."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={
            **os.environ,
            "KVLOOM_BASE_URL": base_url,
            "KVLOOM_MODEL": model,
            "PYTHONPATH": str(ROOT / "sdk"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout
