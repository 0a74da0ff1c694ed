"""Free ports on loopback."""

import socket
from contextlib import ExitStack


class PortTakenError(OSError):
    """Somebody listens there already."""


def check_free(port: int) -> None:
    """Say at once what would else be found out after the engines have loaded.

    Raises:
        PortTakenError: ``port`` can't be listened on.
    """
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError as error:
            raise PortTakenError(
                f"port {port} can't be used ({error.strerror}): choose another with "
                "--port, or --port=0 for any that is free"
            ) from error


def free_ports(count: int) -> list[int]:
    """``count`` different TCP ports that are free now.

    Between this call and their use another process may take one; its owner
    then fails at start with a message of its own.
    """
    with ExitStack() as open_sockets:
        ports = []
        for _ in range(count):
            sock = open_sockets.enter_context(socket.socket())
            sock.bind(("127.0.0.1", 0))
            ports.append(sock.getsockname()[1])
        return ports
