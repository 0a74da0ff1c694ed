"""The first steps of somebody new: install the wheel, type what the README says."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import readme
from e2e.served import Served, served
from environments import interpreter
from hatchling.build import build_wheel
from readme import ROOT

HERE = "http://127.0.0.1:8000/v1"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from these sources."""
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return folder / build_wheel(str(folder))


def _installed(request: pytest.FixtureRequest, wheel: Path, *extras: str) -> Path:
    """The Python of a clean environment with the wheel and what it asks for."""
    needs = list(PROJECT["dependencies"])
    for extra in extras:
        needs += PROJECT["optional-dependencies"][extra]
    name = "-".join(("newcomer", *extras))
    python = interpreter(request.config, name, needs)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    pip += ["--no-deps", "--no-index", "--force-reinstall", wheel]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return python


@pytest.fixture(scope="module")
def bare(request: pytest.FixtureRequest, wheel: Path) -> Path:
    """Without extras."""
    return _installed(request, wheel)


@pytest.fixture(scope="module")
def here() -> Iterator[Served]:
    """A router, as `kvloom up` starts one."""
    with served() as stage:
        yield stage


def _run(python: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [python, "-c", code],
        cwd=python.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def _sample(imported: str, here: Served) -> str:
    """The README's sample that imports this, for the router that is there."""
    (sample,) = (s for s in readme.blocks("python") if f"from {imported} import" in s)
    return sample.replace(HERE, here.base_url).replace('"smollm2"', f'"{here.model}"')


def test_the_openai_sample_needs_no_extra(bare: Path, here: Served) -> None:
    """`pip install kvloom` is enough for the drop-in client."""
    done = _run(bare, _sample("kvloom.openai", here))

    assert done.returncode == 0, done.stderr
    assert "\nreturn (" in done.stdout


def test_the_langgraph_sample_needs_its_extra(
    request: pytest.FixtureRequest, wheel: Path, here: Served
) -> None:
    """`pip install kvloom[langgraph]` is enough for the agent."""
    done = _run(
        _installed(request, wheel, "langgraph"), _sample("kvloom.langchain", here)
    )

    assert done.returncode == 0, done.stderr
    assert "'plan': 'return'" in done.stdout


@pytest.mark.parametrize(
    ("statement", "extra"),
    [
        ("import kvloom.langchain", "langgraph"),
        ("from kvloom.langgraph import KVLoomMiddleware", "langgraph"),
        ("import kvloom.langgraph as k; k.retry_on(ValueError())", "langgraph"),
        ("import kvloom.otel", "otel"),
        ("import kvloom.testing", "testing"),
    ],
)
def test_what_is_not_installed_says_how_to_install_it(
    bare: Path, statement: str, extra: str
) -> None:
    """No riddle, but the command to type."""
    done = _run(bare, statement)

    assert f"pip install 'kvloom[{extra}]'" in done.stderr


def test_everything_else_is_there_without_extras(bare: Path) -> None:
    """The wheel's own modules need nothing that it does not ask for."""
    names = "kvloom.openai, kvloom.httpx, kvloom.telemetry, kvloom.langgraph"
    code = (
        f"import {names}, kvloom; print([getattr(kvloom, n) for n in kvloom.__all__])"
    )

    done = _run(bare, code)

    assert done.returncode == 0, done.stderr
    assert "site-packages" in _run(bare, "import kvloom; print(kvloom.__file__)").stdout
