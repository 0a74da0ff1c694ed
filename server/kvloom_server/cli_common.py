"""What commands have in common: their settings, engines in words, plain errors."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer
from pydantic import ValidationError
from rich.console import Console

from kvloom.protocol import ClusterKeyError

from .cluster.console import say_error
from .keys import KeyFileError
from .router import EnginesFileError
from .router.tracing import TracingUnavailableError
from .said import settings_errors
from .settings import RouterSettings
from .settings_file import SettingsFileError, settings_with

T = TypeVar("T")

KEY_HELP: Final = "The key that engines' lease services and the router share."
ClusterKeyFile = Annotated[Path | None, typer.Option(help=KEY_HELP)]


def read_settings(file: Path | None = None, **given: object) -> RouterSettings:
    """The router's settings: what is given; the environment, then the file, for
    the rest."""
    return settings_with(given, file, os.environ)


def parsed(
    option: str, texts: list[str] | None, parse: Callable[[str], T]
) -> tuple[T, ...] | None:
    """What an option's words mean.

    Raises:
        typer.BadParameter: one means nothing; it names the option.
    """
    try:
        return tuple(map(parse, texts)) if texts else None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


@contextmanager
def plain_errors() -> Iterator[None]:
    """What the user can mend is one sentence and exit code 1, no traceback."""
    try:
        yield
    except ValidationError as error:
        prefix = RouterSettings.model_config["env_prefix"]
        _fail(settings_errors(error.errors(), os.environ, prefix))
    except (
        ClusterKeyError,
        KeyFileError,
        EnginesFileError,
        SettingsFileError,
        TracingUnavailableError,
    ) as error:
        _fail(str(error))
    except OSError as error:
        # Where it names no file its words do without the number.
        _fail(str(error) if error.filename else error.strerror or str(error))


def _fail(text: str) -> None:
    say_error(Console(stderr=True), text)
    sys.exit(1)
