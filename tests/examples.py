"""The examples, and how a test runs one: on fake engines or on real ones."""

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from environments import interpreter
from programs import ran
from readme import ROOT


@dataclass(frozen=True, slots=True)
class Example:
    """One file of ``examples/`` that is a program from start to end."""

    name: str
    arguments: tuple[str, ...] = ()
    is_elsewhere: bool = False
    """Whether it needs packages that cannot be where the project is developed."""

    @property
    def path(self) -> Path:
        return ROOT / "examples" / f"{self.name}.py"


# Beside these: tool_loop.py, which is the demo's, and service.py, which runs on.
PROGRAMS = (
    Example("openai_client"),
    Example("langgraph_agent"),
    Example("supervisor"),
    Example("resume", ("Who are you? " * 10,)),
    Example("deep_agent", is_elsewhere=True),
    Example("openai_agents", is_elsewhere=True),
)


def run(
    example: Example, config: pytest.Config, *, base_url: str, model: str, folder: Path
) -> str:
    """What an example prints; it must end well."""
    python = frameworks(config) if example.is_elsewhere else Path(sys.executable)
    command = [python, example.path, *example.arguments]
    return ran(command, base_url=base_url, model=model, folder=folder)


def frameworks(config: pytest.Config) -> Path:
    """The Python that has the frameworks of the group ``frameworks``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    needs: Sequence[str] = (
        *project["project"]["dependencies"],
        *extras["langgraph"],
        *project["dependency-groups"]["frameworks"],
    )
    return interpreter(config, "frameworks", needs)
