"""What tests make go wrong at a fake engine, and what they see of it."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class EngineDiedError(ConnectionResetError):
    """The engine died in the middle of a stream, as it was told to."""


@dataclass(slots=True, kw_only=True)
class Faults:
    """What goes wrong at an engine; set the attributes as the test needs."""

    down: bool = False
    """Every request, ``/health`` too, is answered with 503."""
    failures: list[tuple[int, str]] = field(default_factory=list)
    """Status and message for the next generation requests, first one first."""
    dies_after_chunks: int | None = None
    """The next stream breaks off after so many chunks; then this is unset."""
    errors_after_chunks: int | None = None
    """The next stream has an error event after so many chunks; then this is
    unset."""
    core_gate: asyncio.Event | None = None
    """Until it is set the engine's core stands still, as after SIGSTOP: HTTP
    requests are taken and ``/health`` is answered, nothing else happens."""
    first_byte_gate: asyncio.Event | None = None
    """Prompts are computed, but answers begin only once it is set."""
    chunk_gate: asyncio.Semaphore | None = None
    """Each event of a stream takes one permit; ``release()`` lets one pass."""
    skips_verification: bool = False
    """Prefill pulls by position and compares nothing, as stock vLLM does."""

    async def core_runs(self) -> None:
        """Return once the core does not stand still."""
        if self.core_gate is not None:
            await self.core_gate.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """A request that an engine received."""

    method: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: Any
    """Decoded JSON; raw bytes where it is none, ``None`` without a body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTurn:
    """A generation request that ended."""

    request_id: str
    """As the client saw it."""
    reason: str
    """``stop``, ``length`` or ``abort``."""
    num_generated: int
    """Tokens of the longest choice."""
