"""The SDK on the oldest openai that it supports: 2.45, which has httpx."""

import os
import subprocess
from pathlib import Path

import pytest
from environments import interpreter

ROOT = Path(__file__).parents[2]

NEEDS = (
    "openai==2.45.0",
    "httpx>=0.28,<1",
    "tenacity>=9,<10",
    "pytest>=9,<10",
    "hypothesis>=6.140,<7",
    "opentelemetry-sdk>=1.30,<2",
    "trio>=0.30,<1",
)

TESTS = (
    "tests/e2e/test_sdk_fake.py",
    "tests/e2e/test_sdk_calls.py",
    "tests/e2e/test_sdk_openai.py",
    "tests/e2e/test_sdk_contexts.py",
    "tests/e2e/test_sdk_crowd.py",
    "tests/e2e/test_sdk_dialects.py",
    "tests/e2e/test_sdk_http.py",
    "tests/e2e/test_sdk_retries.py",
    "tests/e2e/test_sdk_stores.py",
    "tests/e2e/test_sdk_telemetry.py",
)


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest) -> Path:
    """The interpreter of an environment that has openai 2.45."""
    return interpreter(request.config, "openai-2.45", NEEDS)


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
