"""Free ports on loopback."""

import socket
from contextlib import ExitStack


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
