"""The router's settings in a TOML file: below arguments and variables."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .said import settings_errors
from .settings import RouterSettings


class SettingsFileError(ValueError):
    """A settings file is of no use; the message says why."""


def settings_with(
    given: Mapping[str, Any], file: Path | None, environment: Mapping[str, str]
) -> RouterSettings:
    """What is given, then ``KVLOOM_…`` variables, then the file.

    Args:
        given: by name; ``None`` gives nothing.
        file: TOML, ``name = value`` as in the settings' reference.
        environment: the variables.

    Raises:
        SettingsFileError: the file can't be read, is no TOML, or has a value that
            is out of range.
        pydantic.ValidationError: another value is; it names the field.
    """
    prefix = RouterSettings.model_config["env_prefix"]
    set_elsewhere = {name.upper() for name in environment}
    written = {
        name: value
        for name, value in (_read(file) if file is not None else {}).items()
        if f"{prefix}{name}".upper() not in set_elsewhere
    }
    named = {name: value for name, value in given.items() if value is not None}
    try:
        return RouterSettings(**{**written, **named})
    except ValidationError as error:
        own = [e for e in error.errors() if e["loc"] and e["loc"][0] in written]
        own = [each for each in own if each["loc"][0] not in named]
        if not own:
            raise
        raise SettingsFileError(f"{file}: {settings_errors(own, {}, prefix)}") from None


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise SettingsFileError(f"{file} can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsFileError(f"{file} is no TOML: {error}") from error
