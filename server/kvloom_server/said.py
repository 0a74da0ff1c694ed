"""What went wrong, in words for a person."""

import os
from collections.abc import Iterable, Mapping
from typing import Any, Final

import aiohttp

_SECRET: Final = ("key", "token", "password")


def plainly(error: Exception) -> str:
    """What an HTTP client's error says, without the client's own terms."""
    if isinstance(error, aiohttp.ClientConnectorError):
        where = f"{error.host}:{error.port}"
        why = error.os_error
        code = why.errno if why.errno is not None and why.errno > 0 else None
        return f"{where}: {os.strerror(code) if code else why.strerror or why}"
    return str(error) or type(error).__name__


def settings_errors(
    errors: Iterable[Mapping[str, Any]], environment: Mapping[str, str], prefix: str
) -> str:
    """What is wrong with settings: each by its name, and by the variable and the
    value that it came from.

    Args:
        errors: pydantic's.
        environment: where settings may come from.
        prefix: of the variables there.
    """
    return "; ".join(
        _setting_error(each["loc"], each["msg"], environment, prefix) for each in errors
    )


def _setting_error(
    where: tuple[int | str, ...],
    message: str,
    environment: Mapping[str, str],
    prefix: str,
) -> str:
    if not where:
        # What concerns several settings names them itself.
        return message.removeprefix("Value error, ")
    variable = f"{prefix}{where[0]}".upper()
    given = environment.get(variable)
    if given is None:
        return f"{'.'.join(map(str, where))}: {message}"
    if any(word in variable.lower() for word in _SECRET):
        return f"{variable}: {message}"
    return f"{variable}={given}: {message}"
