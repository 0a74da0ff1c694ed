"""What ``docs/sdk.md`` says of the SDK is what it does."""

import re
from collections.abc import Iterator
from importlib import import_module, util
from pathlib import Path
from typing import Any

import pytest
import readme
from e2e.served import Served, served
from readme import ROOT

SDK = ROOT / "docs" / "sdk.md"
HERE = "http://127.0.0.1:8000/v1"
SAMPLES = [sample for sample in readme.blocks("python", SDK) if HERE in sample]
OWN = [sample for sample in readme.blocks("python", SDK) if HERE not in sample]


@pytest.fixture(scope="module")
def here() -> Iterator[Served]:
    """A router, as `kvloom up` starts one."""
    with served() as stage:
        yield stage


# Clients that a sample leaves open are closed with its process.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("sample", SAMPLES, ids=range(len(SAMPLES)))
def test_every_sample_runs(
    sample: str, here: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied out of the document, it asks a router and ends well."""
    monkeypatch.chdir(tmp_path)
    before = len(here.stage.cluster.decode[0].engine.finished)
    code = sample.replace(HERE, here.base_url).replace('"smollm2"', f'"{here.model}"')

    exec(compile(code, SDK.name, "exec"), {"__name__": "__main__"})

    assert len(here.stage.cluster.decode[0].engine.finished) > before


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_streamed_answer_is_printed_as_one_text(
    here: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not one token a line."""
    (sample,) = (s for s in SAMPLES if "stream=True" in s)
    code = sample.replace(HERE, here.base_url).replace('"smollm2"', f'"{here.model}"')
    exec(compile(code, SDK.name, "exec"), {"__name__": "__main__"})

    printed = capsys.readouterr().out
    assert len(printed.split()) > 5
    assert len(printed.splitlines()) < 3


def test_the_sample_with_fake_engines_is_a_test_that_passes() -> None:
    """It starts its own engines and router, and ends them."""
    (sample,) = OWN
    assert "FakeCluster" in sample
    exec(compile(sample, SDK.name, "exec"), {"__name__": "__main__"})


def _surface() -> Any:
    spec = util.spec_from_file_location("surface", ROOT / "docs" / "write_surface.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_in_the_document() -> None:
    """`python docs/write_surface.py` writes the list; it is ``__all__``'s."""
    text = SDK.read_text()
    surface = _surface()

    assert surface.updated(text) == text
    for name in surface.MODULES:
        table = text.partition(f"**{name}**")[2].partition("\n**")[0]
        told = re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)
        assert sorted(told) == sorted(import_module(name).__all__)


def test_every_public_module_is_in_the_document() -> None:
    """Whatever has no underscore; the protocol is what the packages say to each
    other."""
    folder = ROOT / "sdk" / "kvloom"
    modules = {p.stem for p in folder.iterdir() if not p.stem.startswith("_")}
    elsewhere = {"protocol", "py"}  # py.typed

    told = {name.removeprefix("kvloom.") for name in _surface().MODULES} - {"kvloom"}
    assert told == modules - elsewhere


def test_links_of_the_document_lead_somewhere() -> None:
    """Within the repository."""
    for path in re.findall(r"\]\(([^)#]+)\)", SDK.read_text()):
        assert (SDK.parent / path).exists(), path
