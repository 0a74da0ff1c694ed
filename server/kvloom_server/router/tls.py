"""Certificates, looked at before anything starts."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvloom_server.keys import KeyFileError
from kvloom_server.settings import RouterSettings


def check_tls(settings: RouterSettings) -> None:
    """Whether the settings' certificates can be used.

    Raises:
        KeyFileError: they can't; the message says which file.
    """
    if settings.upstream_ca_file is not None:
        trusted(settings.upstream_ca_file)
    if settings.tls_cert is None:
        return
    with _usable(settings.tls_cert, settings.tls_key):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.tls_cert, settings.tls_key)


def trusted(ca_file: Path | None) -> ssl.SSLContext:
    """Whom to believe that an ``https://`` engine is one; ``None``: whom the machine
    does.

    Raises:
        KeyFileError: the file is of no use.
    """
    with _usable(ca_file):
        return ssl.create_default_context(cafile=ca_file)


@contextmanager
def _usable(*files: Path | None) -> Iterator[None]:
    named = [file for file in files if file is not None]
    for file in named:
        if not file.is_file():
            raise KeyFileError(f"there is no file {file}")
    try:
        yield
    except (ssl.SSLError, OSError) as error:
        raise KeyFileError(
            f"the TLS files {', '.join(map(str, named))} are of no use: {error}"
        ) from error
