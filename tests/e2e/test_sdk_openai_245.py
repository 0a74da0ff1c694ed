"""The SDK on the oldest openai that it supports: 2.45, which has httpx.

The environment is made from PyPI once and kept in pytest's cache. Without PyPI
the test is skipped, unless ``CI`` is set.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

NEEDS = (
    "openai==2.45.0",
    "httpx>=0.28,<1",
    "tenacity>=9,<10",
    "pytest>=9,<10",
    "hypothesis>=6.140,<7",
    "opentelemetry-sdk>=1.30,<2",
)

TESTS = (
    "tests/e2e/test_sdk_fake.py",
    "tests/e2e/test_sdk_calls.py",
    "tests/e2e/test_sdk_openai.py",
    "tests/e2e/test_sdk_crowd.py",
    "tests/e2e/test_sdk_dialects.py",
    "tests/e2e/test_sdk_http.py",
    "tests/e2e/test_sdk_retries.py",
    "tests/e2e/test_sdk_telemetry.py",
)


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest) -> Path:
    """The interpreter of an environment that has openai 2.45."""
    assert request.config.cache is not None
    home = Path(request.config.cache.mkdir("openai-2.45"))
    interpreter, stamp = home / "bin" / "python", home / "needs"
    wanted = " ".join((sys.version, *NEEDS))
    if stamp.exists() and stamp.read_text() == wanted:
        return interpreter
    venv.create(home, clear=True)
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "install"]
    pip += ["--quiet", "--no-compile", "--retries=1", *NEEDS]
    made = subprocess.run(pip, capture_output=True, text=True, check=False)
    if made.returncode != 0 and "CI" not in os.environ:
        pytest.skip(f"PyPI cannot be reached: {made.stderr.strip()[-200:]}")
    assert made.returncode == 0, made.stderr
    stamp.write_text(wanted)
    return interpreter


def test_all_of_it_holds_on_openai_2(python: Path) -> None:
    """What holds on openai 3 holds on 2.45: the same tests, run there."""
    paths = [str(ROOT / "sdk"), str(ROOT / "tests")]
    # Without the project's own configuration, which names plugins that are not there.
    options = ["-q", "-c", os.devnull, f"--rootdir={ROOT}", "-W", "error"]
    options += ["-p", "no:cacheprovider", "--import-mode=importlib"]
    ran = subprocess.run(
        [python, "-m", "pytest", *options, *TESTS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-2000:]
    version = subprocess.run(
        [python, "-c", "import openai; print(openai.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert version.stdout.strip() == "2.45.0"
