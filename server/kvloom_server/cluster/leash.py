"""Runs a command that ends when the process that started it does.

``python -m kvloom_server.cluster.leash PARENT_PID COMMAND…``. A supervisor that
is killed cannot clean up; Linux then sends the command SIGTERM. Elsewhere the
command simply runs.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def main(argv: list[str]) -> None:
    """Bind this process's life to the parent's and become the command."""
    parent, command = int(argv[0]), argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        # It was gone before the leash was on.
        sys.exit(f"{command[0]}: not started, its parent {parent} is gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
