"""A fake of vLLM with kvloom's connector: real leases, real prefix cache, no model."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, Self, Unpack

from starlette.applications import Starlette

from .asks import Ask
from .cache import BlockPool
from .changes import Changes
from .core import EngineCore
from .fabric import FakeFabric
from .faults import Faults, FinishedTurn, RecordedRequest
from .http import build_app
from .leases import LOOPBACK, LeaseService
from .options import EngineOptions, Options
from .turns import Turn

Role = Literal["prefill", "decode"]


class FakeEngine:
    """A fake vLLM engine.

    ``app`` is its HTTP surface (ASGI). Use the engine as an async context
    manager, or call :meth:`start` and :meth:`aclose`; in between its lease
    service listens.

    Args:
        role: ``prefill`` claims leases, ``decode`` grants them; both answer for
            their core at their lease address.
        name: for messages and metrics.
        fabric: through which engines read each other's blocks; engines that are
            to work together share one.
        options: the keywords of :class:`Options`.

    Raises:
        ValueError: the options contradict each other.
    """

    def __init__(
        self,
        role: Role,
        *,
        name: str | None = None,
        fabric: FakeFabric | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self.role: Role = role
        self.name = name or role
        self.options = Options(**options)
        self.fabric = fabric or FakeFabric()
        self.faults = Faults()
        self.changes = Changes()
        self.requests: list[RecordedRequest] = []
        """Every request received, ``/health`` and ``/metrics`` too."""
        self.finished: list[FinishedTurn] = []
        """Every generation request that ended, in order."""
        self.counters: dict[str, int] = {}
        """Totals for ``/metrics``, by the series' name."""
        self.hang_up: Callable[[Any], None] | None = None
        """Set by the server: cuts the connection of an ASGI scope."""
        self._lease_port = 0
        self._is_started = False
        self.core = self._new_core()
        self.app: Starlette = build_app(self)

    def __repr__(self) -> str:
        return f"FakeEngine({self.role} {self.name!r}, {self.pool!r})"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Join the fabric and open the lease service."""
        if not self._is_started:
            self._is_started = True
            self._lease_port = await self.core.start(lease_port=self._lease_port)

    async def aclose(self) -> None:
        """Leave, as a process that ends: nobody is told. What was cached and
        leased is gone; :meth:`start` comes back at the same lease address, with
        another engine ID and boot ID."""
        if self._is_started:
            self._is_started = False
            await self.core.aclose()
            self.core = self._new_core()
            self.changes.notify()

    async def restart(self) -> None:
        """Die and come back."""
        await self.aclose()
        await self.start()

    def _new_core(self) -> EngineCore:
        return EngineCore(
            options=self.options,
            fabric=self.fabric,
            faults=self.faults,
            changes=self.changes,
            grants_leases=self.role == "decode",
        )

    # What it is made of

    @property
    def engine_id(self) -> str:
        """Under which the fabric knows it; another one after each restart."""
        return self.core.engine_id

    @property
    def pool(self) -> BlockPool:
        return self.core.pool

    @property
    def leases(self) -> LeaseService:
        """The lease service; a prefill engine's lists nothing."""
        return self.core.leases

    @property
    def lease_address(self) -> str:
        """Where the lease service listens, ``tcp://host:port``.

        Raises:
            RuntimeError: it was never started.
        """
        if not self._lease_port:
            raise RuntimeError(
                f"{self.name} has no lease address yet: start it first "
                "(`async with engine:`)"
            )
        return f"tcp://{LOOPBACK}:{self._lease_port}"

    # What tests do to it, and wait for

    def stand_still(self) -> None:
        """Stop the core, as SIGSTOP does; its HTTP server goes on."""
        self.faults.core_gate = asyncio.Event()

    def go_on(self) -> None:
        """Let a core that stands still go on where it was."""
        if self.faults.core_gate is not None:
            self.faults.core_gate.set()

    def fail_next(
        self, count: int = 1, *, status: int = 500, message: str = "injected failure"
    ) -> None:
        """Answer the next generation requests with an error."""
        self.faults.failures += [(status, message)] * count

    def reset_prefix_cache(self) -> bool:
        """Forget what is cached, as vLLM's development endpoint does: nothing
        happens while any block is held, which ``False`` says."""
        if self.pool.num_held:
            return False
        self.pool.forget()
        return True

    def lose_cache(self) -> None:
        """Forget what is cached, even while blocks are held."""
        self.pool.forget()

    def received(self, path: str) -> list[RecordedRequest]:
        """The requests received so far on one path."""
        return [request for request in self.requests if request.path == path]

    async def until_received(self, path: str, count: int = 1) -> None:
        """Return once ``count`` requests have arrived on ``path``."""
        await self.changes.until(lambda: len(self.received(path)) >= count)

    async def until_idle(self) -> None:
        """Return once no turn is running or waiting."""
        core = self.core
        await self.changes.until(lambda: not (core.num_running or core.num_waiting))

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where blocks or leases contradict themselves."""
        self.pool.check_integrity()
        self.core.leases.book.check_integrity()

    # For its HTTP surface

    def record(self, request: RecordedRequest) -> None:
        self.requests.append(request)
        self.changes.notify()

    def count(self, series: str, amount: int = 1) -> None:
        """Add to a counter of ``/metrics``."""
        self.counters[series] = self.counters.get(series, 0) + amount

    @contextlib.asynccontextmanager
    async def turn(self, ask: Ask, index: int = 0) -> AsyncIterator[Turn]:
        """Serve prompt number ``index`` of a request.

        A turn that is left before it was advanced to its end is aborted.
        """
        turn: Turn | None = None
        try:
            async with self.core.turn(ask, index) as turn:
                self._count_prompt(turn)
                yield turn
        finally:
            self._note_end(ask, turn)

    def _count_prompt(self, turn: Turn) -> None:
        queried = len(turn.prompt.token_ids)
        local, returned = turn.outcome.local_tokens, turn.outcome.returned_tokens
        self.count("vllm:prompt_tokens_total", queried)
        self.count("vllm:prefix_cache_queries_total", queried)
        self.count("vllm:prefix_cache_hits_total", local)
        self.count("vllm:external_prefix_cache_queries_total", queried - local)
        self.count("vllm:external_prefix_cache_hits_total", returned)

    def _note_end(self, ask: Ask, turn: Turn | None) -> None:
        num_generated = 0 if turn is None else turn.num_generated
        is_whole = turn is not None and turn.is_generated
        reason = turn.outputs[0].finish_reason if turn and is_whole else "abort"
        self.count("vllm:generation_tokens_total", num_generated)
        self.count(f"vllm:request_success_total:{reason}")
        self.finished.append(
            FinishedTurn(
                request_id=ask.request_id, reason=reason, num_generated=num_generated
            )
        )
        self.changes.notify()
