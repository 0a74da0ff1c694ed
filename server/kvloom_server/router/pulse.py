"""Whether an engine's core is alive: what was asked of it, and what it said.

A stopped or stuck core leaves its HTTP server answering. Its lease service
lives in the core's process, so that silence there tells. Bytes of an answer
tell the contrary, however busy the service may be.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

NUM_STEPS: Final = 4
"""Silence is counted in steps, each of which the router itself lived through:
a router that stood still for a while must not take its engines for dead."""


class Timer(Protocol):
    """What was put off, and may be called off."""

    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], Timer]
"""Calls a function after so many seconds."""


def on_the_loop(delay_s: float, act: Callable[[], None]) -> Timer:
    """``act`` on the running event loop."""
    return asyncio.get_running_loop().call_later(delay_s, act)


class Pulse:
    """One engine's signs of life.

    An engine that was never heard is not judged: it may have no service, or a
    mistyped address.
    """

    def __init__(
        self,
        *,
        hang_after_s: float,
        judge: Callable[[bool], None],
        later: Later = on_the_loop,
    ) -> None:
        """``judge`` is told when the engine falls silent (``True``), and when
        that is over."""
        self._step_s = hang_after_s / NUM_STEPS
        self._judge = judge
        self._later = later
        self._is_known = False
        self._is_silent = False
        self._num_missed = 0
        self._timer: Timer | None = None

    def asked(self) -> None:
        """The service was asked something; it has from now on to answer."""
        if self._is_known and not self._is_silent and self._timer is None:
            self._num_missed = 0
            self._wait()

    def heard(self) -> None:
        """The service said something."""
        self._is_known = True
        self._settle()

    def worked(self) -> None:
        """The engine sent bytes of an answer."""
        self._num_missed = 0

    def forget(self) -> None:
        """The engine is down, or its service can't be trusted: judge anew only
        once the service is heard."""
        self._is_known = False
        self._settle()

    def _settle(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_silent:
            self._is_silent = False
            self._judge(False)

    def _wait(self) -> None:
        self._timer = self._later(self._step_s, self._step)

    def _step(self) -> None:
        self._num_missed += 1
        if self._num_missed < NUM_STEPS:
            self._wait()
            return
        self._timer = None
        self._is_silent = True
        self._judge(True)
