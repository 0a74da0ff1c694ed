"""Certificates, looked at before anything starts."""

import ssl

from kvloom_server.keys import KeyFileError
from kvloom_server.settings import RouterSettings


def check_tls(settings: RouterSettings) -> None:
    """Whether the settings' certificates can be used.

    Raises:
        KeyFileError: they can't; the message says which file.
    """
    files = (settings.tls_cert, settings.tls_key, settings.upstream_ca_file)
    for file in files:
        if file is not None and not file.is_file():
            raise KeyFileError(f"there is no file {file}")
    try:
        if settings.tls_cert is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(settings.tls_cert, settings.tls_key)
        if settings.upstream_ca_file is not None:
            ssl.create_default_context(cafile=settings.upstream_ca_file)
    except (ssl.SSLError, OSError) as error:
        raise KeyFileError(
            f"the TLS files {', '.join(str(f) for f in files if f)} are of no use: "
            f"{error}"
        ) from error
