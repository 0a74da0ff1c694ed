"""Free ports on loopback."""

import random
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

FIRST_PORT: Final = 20_000
"""Below are the ports of well-known services."""

_EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


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
    """``count`` different TCP ports that are free now, and likely to stay so.

    Raises:
        PortTakenError: there are not so many.
    """
    return free_runs([1] * count)


def free_runs(lengths: Sequence[int]) -> list[int]:
    """The first ports of runs of such lengths: free now, and likely to stay so.

    An engine binds its ports many seconds later. Until then the kernel hands
    ports of its ephemeral range to every connection on the machine, so these
    are from below it.

    Raises:
        PortTakenError: there are not so many.
    """
    below = range(FIRST_PORT, _first_ephemeral_port())
    shuffled = iter(random.sample(below, len(below)))
    taken: set[int] = set()
    firsts: list[int] = []
    for length in lengths:
        for first in shuffled:
            run = range(first, first + length)
            if taken.isdisjoint(run) and run[-1] in below and all(map(_is_free, run)):
                break
        else:
            raise PortTakenError(
                f"no {sum(lengths)} free ports from {below.start} to {below.stop}"
            )
        taken.update(run)
        firsts.append(first)
    return firsts


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _first_ephemeral_port() -> int:
    try:
        first = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        # Not Linux: the start of the range that IANA gives (RFC 6335).
        return 49152
    # Somebody who moved the range down gets its upper part all the same.
    return first if first > FIRST_PORT + 1000 else 65536
