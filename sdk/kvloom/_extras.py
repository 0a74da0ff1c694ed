"""What to install where an integration's packages are missing."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needing(what: str) -> Iterator[None]:
    """Around imports: if a package is not there, says how to get it.

    Args:
        what: pip installs, such as ``kvloom[langgraph]``.

    Raises:
        ModuleNotFoundError: with the command to type, in place of Python's own.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        raise ModuleNotFoundError(
            f"{package} is not installed: pip install '{what}'",
            name=error.name,
        ) from error
