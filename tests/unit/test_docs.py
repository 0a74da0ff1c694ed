"""What the documents say is what the code does."""

import importlib.util
import json
import re
import shlex
import sys
from types import ModuleType

import pytest
import readme
import typer.main
from prometheus_client import CollectorRegistry
from readme import ROOT
from typer.testing import CliRunner

from kvloom_server.cli import app
from kvloom_server.router.compose import build_app
from kvloom_server.settings import RouterSettings, parse_engine

HOSTS = ROOT / "docs" / "hosts.md"
OPERATING = ROOT / "docs" / "operating.md"


def script(path: str) -> ModuleType:
    """A script as a module; it may import its neighbours, as when it is run."""
    sys.path.insert(0, str((ROOT / path).parent))
    try:
        return _loaded(path)
    finally:
        sys.path.pop(0)


def _loaded(path: str) -> ModuleType:
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


def test_the_benchmarks_figures_come_from_result_files() -> None:
    """docs/benchmarks.md is what the script writes
    (`python benchmarks/render_benchmarks.py --plots`), and its pictures are there."""
    render = script("benchmarks/render_benchmarks.py")
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert render.render() == text
    pictures = re.findall(r"\]\(([\w-]+\.png)\)", text)
    assert pictures
    for picture in pictures:
        assert (ROOT / "docs" / picture).exists()


def test_the_clients_figures_come_from_a_result_file() -> None:
    """No figure is typed (`python benchmarks/render_clients.py`)."""
    render = script("benchmarks/render_clients.py")
    text = (ROOT / "docs" / "clients.md").read_text()
    assert render.updated(text) == text


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


@pytest.mark.parametrize("path", ["README.md", "docs/sdk.md", "docs/hosts.md"])
def test_a_reader_who_is_to_install_kvloom_knows_where_from(path: str) -> None:
    """While no index has it: said before the first extra is named, and how else."""
    told, _, rest = (ROOT / path).read_text().partition("not on PyPI yet")
    before = re.sub(r"path/to/checkout\[\w+\]", "", told)
    assert rest
    assert not re.search(r"kvloom\[\w", before)
    assert "path/to/checkout[" in told + rest


def test_programs_of_the_checkout_install_the_checkout() -> None:
    """What `pip install` in their words names is there."""
    paths = [*(ROOT / "examples").glob("*.py"), ROOT / "notebooks" / "README.md"]
    for path in paths:
        for line in re.findall(r"pip install [^`\n]+", path.read_text()):
            assert not re.search(r"\bkvloom\b", line), f"{path}: {line}"


def samples() -> dict[str, str]:
    """Everything that a reader may run against one cluster, by where it is."""
    documents = [readme.README, *(ROOT / "docs").glob("*.md")]
    blocks = {
        f"{path.name}, sample {number}": sample
        for path in documents
        for number, sample in enumerate(readme.blocks("python", path), 1)
    }
    programs = [*(ROOT / "examples").glob("*.py"), *(ROOT / "notebooks").glob("*.py")]
    return blocks | {path.name: path.read_text() for path in programs}


def test_no_sample_goes_on_in_the_conversation_of_another() -> None:
    """Run one after the other they show what they show alone."""
    names = re.compile(r'(?:\bconversation\(|"thread_id": )"([^"]+)"')
    of: dict[str, str] = {}
    for where, code in samples().items():
        for name in set(names.findall(code)):
            assert name not in of, f"{where} and {of[name]}: {name}"
            of[name] = where
    assert len(of) > 15


def table(path: str, name: str) -> list[list[str]]:
    """The cells of a marked table, without its head."""
    _, _, rest = (ROOT / path).read_text().partition(f"<!-- {name}:begin")
    rows = rest.partition(f"<!-- {name}:end")[0].splitlines()
    cells = [
        [c.strip() for c in row.strip("|").split("|")] for row in rows if "|" in row
    ]
    return cells[2:]


def test_every_metric_is_documented() -> None:
    """docs/operating.md lists what the router has, by name, type and meaning."""
    registry = CollectorRegistry()
    build_app(RouterSettings(), registry=registry)
    have = {
        family.name + ("_total" if family.type == "counter" else ""): (
            family.type,
            family.documentation.rstrip("."),
        )
        for family in registry.collect()
    }
    rows = table("docs/operating.md", "metrics")
    told = {name.strip("`"): (kind, what) for name, kind, _, what in rows}
    assert told.keys() == have.keys()
    for name, (kind, documentation) in have.items():
        assert told[name][0] == kind, name
        assert told[name][1].startswith(documentation), name


def test_every_metric_of_the_connector_is_documented() -> None:
    """By name and meaning, as an engine shows it."""
    source = (ROOT / "connector" / "kvloom_connector" / "stats.py").read_text()
    made = re.findall(
        r'self\._(gauge|counter)_cls\(\s*name="([^"]+)",\s*documentation="([^"]+)"',
        source,
    )
    have = {
        (name + ("_total" if kind == "counter" else ""), kind, text)
        for kind, name, text in made
    }
    assert len(have) >= 5
    rows = table("docs/operating.md", "engines")
    assert {(name.strip("`"), kind, what) for name, kind, _, what in rows} == have


def test_every_request_that_changes_the_fleet_is_documented() -> None:
    """docs/operating.md has what the router's description of itself has."""
    text = (ROOT / "server/kvloom_server/router/openapi.json").read_text()
    told = OPERATING.read_text()
    asked = [
        f"| `{method.upper()} {path}` |"
        for path, methods in json.loads(text)["paths"].items()
        if path.startswith(("/kvloom/engines", "/kvloom/conversations"))
        for method in methods
    ]
    assert len(asked) == 6
    assert [row for row in asked if row not in told] == []


@pytest.mark.parametrize(
    "command", [c for c in readme.commands(HOSTS) if " engine-args " in c]
)
def test_engine_commands_of_the_hosts_guide_run(command: str) -> None:
    """They print an engine's command line."""
    done = CliRunner().invoke(app, shlex.split(command)[1:])
    assert done.exit_code == 0, done.output
    assert "vllm.entrypoints" in done.stdout


def test_routers_of_the_hosts_guide_know_the_engines() -> None:
    """`kvloom serve` takes the line, and it names what the engines' lines do."""
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]  # a group
    commands = readme.commands(HOSTS)
    printed = "".join(
        CliRunner().invoke(app, shlex.split(c)[1:]).stderr
        for c in commands
        if " engine-args " in c
    )
    served = [c for c in commands if " serve " in c]
    assert len(served) == 2
    for command in served:
        options = serve.make_context("serve", shlex.split(command)[2:]).params
        for role in ("prefill", "decode"):
            for engine in options[role]:
                assert parse_engine(engine).lease_address
                assert f"--{role} {engine}" in printed


def test_every_command_of_the_guides_is_run_somewhere() -> None:
    """What is neither of the above has its test."""
    others = [
        command
        for path in (HOSTS, OPERATING)
        for command in readme.commands(path)
        if not command.startswith(("kvloom engine-args ", "kvloom serve "))
    ]
    # tests/e2e/test_status.py
    assert set(others) == {"kvloom status", "kvloom status --watch"}


def test_pictures_of_the_guides_are_there() -> None:
    """`python docs/write_screenshots.py` makes them."""
    for path in (HOSTS, OPERATING):
        for picture in re.findall(r"[\w-]+\.png", path.read_text()):
            assert (ROOT / "docs" / picture).exists()


def test_make_and_ci_run_what_the_readme_says() -> None:
    """`make demo` is `kvloom demo`, and CI runs `make check` and `make test`."""
    makefile = (ROOT / "Makefile").read_text()
    assert "$(BIN)/kvloom demo" in makefile
    for option in re.findall(r"`make demo (\w+)=", readme.README.read_text()):
        passed = f"$(if $({option}),--{option.lower()} $({option}))"
        assert passed in makefile, option
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert ci[-2:] == ["make check", "make test"]
