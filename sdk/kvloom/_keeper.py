"""``python -m kvloom._keeper ARGUMENTS…``: kvloom's command line, on a leash.

It ends when its standard input does, which is when the process that started it
ends, in whatever way: a notebook's kernel that is killed leaves no engines behind.
"""

import os
import runpy
import signal
import sys
import threading


def main() -> None:
    """Become the command line."""
    threading.Thread(target=_end_with_input, name="keeper", daemon=True).start()
    runpy.run_module("kvloom_server", run_name="__main__", alter_sys=True)


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
