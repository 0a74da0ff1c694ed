"""What the documents say is what the code does."""

import importlib.util
import json
import re
from types import ModuleType

import readme
from readme import ROOT


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("script", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_architecture_lists_every_module() -> None:
    """The list in ARCHITECTURE.md is the code's (`python docs/write_modules.py`)."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert script("docs/write_modules.py").updated(text) == text


def test_the_readmes_figures_come_from_a_result_file() -> None:
    """No figure is typed (`python benchmarks/render_demo.py`)."""
    render = script("benchmarks/render_demo.py")
    text = readme.README.read_text()
    assert render.updated(text, json.loads(render.RESULT.read_text())) == text


def test_every_command_of_the_readme_is_run_somewhere() -> None:
    """A command that nobody runs here is a command that may not work."""
    run_by = {
        # tests/engine/test_user_paths.py
        "make demo",
        "kvloom up",
        # .ci/run
        "make test",
        "make check",
    }
    assert set(readme.commands()) == run_by
    for path in re.findall(r"\]\(([\w/.]+)\)", readme.README.read_text()):
        assert (ROOT / path).exists(), f"the README links to {path}"


def test_make_and_ci_run_what_the_readme_says() -> None:
    """`make demo` is `kvloom demo`, and CI runs `make check` and `make test`."""
    makefile = (ROOT / "Makefile").read_text()
    assert "$(BIN)/kvloom demo" in makefile
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert ci[-2:] == ["make check", "make test"]
