"""What is installed from the wheel is all that the commands need."""

import zipfile

import pytest
from hatchling.build import build_wheel
from readme import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The project's wheel, built from these sources."""
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        name = build_wheel(str(folder))
    with zipfile.ZipFile(folder / name) as archive:
        yield archive


def test_it_carries_what_the_demo_plays(wheel):
    """The very file of the checkout, where `kvloom demo` looks for it."""
    packed = wheel.read("kvloom_server/examples/tool_loop.py")
    assert packed == (ROOT / "examples" / "tool_loop.py").read_bytes()


def test_it_carries_the_page_and_the_templates(wheel):
    """Whatever is no Python file is easily forgotten."""
    names = set(wheel.namelist())
    for package in ("sdk/kvloom", "server/kvloom_server", "connector/kvloom_connector"):
        source = ROOT / package.split("/")[0]
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert str(path.relative_to(source)) in names


def test_it_carries_nothing_else(wheel):
    """Neither tests nor documents."""
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {t for t in tops if not t.endswith(".dist-info")} == {
        "kvloom",
        "kvloom_server",
        "kvloom_connector",
    }
