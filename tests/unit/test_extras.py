"""What we tell a user to install can be installed."""

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution

import pytest
from readme import ROOT

from kvloom._extras import needing

NAMED = re.compile(r"kvloom\[([\w.,-]+)\]")
FOLDERS = ("sdk", "server", "connector", "docs", "examples", "notebooks", "benchmarks")


def _texts() -> Iterator[tuple[str, str]]:
    paths = list(ROOT.glob("*.md"))
    for folder in FOLDERS:
        for ending in ("py", "md"):
            paths += (ROOT / folder).rglob(f"*.{ending}")
    for path in paths:
        yield str(path.relative_to(ROOT)), path.read_text()


def test_every_extra_that_is_named_exists() -> None:
    """In an error, a docstring or a document: pip only warns of one that does not,
    and the package is missing still."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        (extra, path)
        for path, text in _texts()
        for extras in NAMED.findall(text)
        for extra in extras.split(",")
    }
    assert {extra for extra, _ in named} >= {"langgraph", "otel", "testing"}
    unknown = {n for n in named if n[0] not in project["optional-dependencies"]}
    assert not unknown


def test_whatever_is_missing_is_named_as_pip_takes_it() -> None:
    """An import that fails names an extra of ours, or a package that there is."""
    asked = {
        what
        for path, text in _texts()
        if path.startswith(("sdk/", "server/"))
        for what in re.findall(r'needing\("([^"]+)"\)', text)
    }
    assert "httpx2" in asked
    for what in asked:
        assert distribution(what.partition("[")[0])


def test_a_package_of_somebody_else_is_no_extra_of_ours() -> None:
    """`kvloom.httpx2` without httpx2: openai 2 does not bring it."""
    with (
        pytest.raises(ModuleNotFoundError, match="pip install 'httpx2'"),
        needing("httpx2"),
    ):
        raise ModuleNotFoundError("No module named 'httpx2'", name="httpx2")
