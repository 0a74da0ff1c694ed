"""Waiting for what other processes do, and comparing what they said."""

import time
from collections.abc import Iterator

PATIENCE_S = 30.0


def attempts(what: str, *, limit_s: float = PATIENCE_S) -> Iterator[None]:
    """Tries until the body leaves the loop; fails after the limit."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        yield
        # Another process's state has no event to wait for.
        time.sleep(0.05)
    raise AssertionError(f"waited {limit_s:.0f} s for {what}")


def common_prefix_len(a: list[int], b: list[int]) -> int:
    """Tokens that two sequences share from their start."""
    most = min(len(a), len(b))
    return next((i for i in range(most) if a[i] != b[i]), most)
