"""``kvloom bench pressure``: does a decision cost more as conversations grow?

The router's map of conversations, its experience and its plans, in this process
and without engines. ``benchmarks/lease_book.py`` does the same with decode's
lease book, which the server does not import.
"""

import gc
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, TypeVar

import msgspec

from kvloom.protocol import LeaseEvent, LeaseRecord, Leases, LeaseState
from kvloom_server.router.directory import Directory
from kvloom_server.router.experience import Experience
from kvloom_server.router.identity import conversation_tag, new_turn_id
from kvloom_server.router.plan import EngineView, Fleet, Turn, plan
from kvloom_server.router.story import Story, story_of

from .results import Results

SIZES: Final = (10, 100, 1_000, 10_000, 100_000)
NUM_ENGINES: Final = 4
"""Of each role."""
NUM_TOKENS: Final = 4096
"""Of a lease."""
T = TypeVar("T")
NOW: Final = 1_000_000.0
SAMPLES: Final = 500
"""Operations a measurement."""
ROUNDS: Final = 5
"""Measurements of each, in CPU time: the machine may have other work."""


@dataclass(slots=True)
class Crowd:
    """A router's memory with many conversations in it, each with one lease."""

    directory: Directory
    experience: Experience
    tags: list[bytes]
    story: Story

    @classmethod
    def of(cls, size: int) -> "Crowd":
        """``size`` conversations that have each had a turn; there is no room for
        more, so that a new one pushes the oldest out."""
        made = cls(
            directory=Directory(
                max_conversations=size, idle_s=3600.0, max_bytes=1 << 40
            ),
            experience=Experience(
                max_conversations=size, max_direct_tokens=512, learns_threshold=True
            ),
            tags=[_tag(number) for number in range(size)],
            story=_story(),
        )
        for tag in made.tags:
            made.turn(tag)
        return made

    def turn(self, tag: bytes) -> None:
        """All that the map does for one turn, from its plan to its lease."""
        outlook = self.experience.began(tag, self.story, NOW)
        known = self.directory.find(tag)
        asked = Turn(
            tag=tag,
            affinity=b"tools and system prompt",
            news=outlook.news,
            prefilled_tokens=outlook.prefilled_tokens,
        )
        decided = plan(asked, known, self.fleet(), NOW, self.experience.prices)
        turn_id = new_turn_id(tag)
        if decided.lease is not None:
            self.directory.supersede(turn_id, decided.lease)
        self.directory.began(
            tag, prefill=decided.prefill, decode=decided.decode, now=NOW
        )
        granted = LeaseEvent(
            seq=1,
            lease_id=turn_id,
            state=LeaseState.GRANTED,
            num_tokens=NUM_TOKENS,
            deadline_unix=NOW + 480,
        )
        self.directory.apply(decided.decode, granted, NOW)
        mark = outlook.reading.mark if outlook.reading else None
        assert mark is not None, "every request here tells a story"
        self.experience.paces.ended(tag, turn_id=turn_id, mark=mark, now=NOW)

    def fleet(self) -> Fleet:
        """The engines, as loaded as the map says."""
        return Fleet(
            prefill=[EngineView(name=f"p{i}", is_up=True) for i in range(NUM_ENGINES)],
            decode=[
                EngineView(
                    name=f"d{i}",
                    is_up=True,
                    num_conversations=self.directory.num_bound(f"d{i}"),
                    resident_tokens=self.directory.num_resident(f"d{i}"),
                )
                for i in range(NUM_ENGINES)
            ],
        )

    def snapshot(self, engine: str) -> Leases:
        """All leases of one engine, as its lease service lists them."""
        held = [
            (lease.lease_id, lease.deadline_unix)
            for tag in self.tags
            if (known := self.directory.find(tag)) is not None
            for lease in known.leases
            if lease.engine == engine
        ]
        records = [
            LeaseRecord(
                lease_id=lease_id,
                state=LeaseState.GRANTED,
                num_tokens=NUM_TOKENS,
                num_blocks=NUM_TOKENS // 16,
                deadline_unix=deadline,
            )
            for lease_id, deadline in held
        ]
        return Leases(engine_id=engine, boot_id="b", seq=1, leases=records)


def _tag(number: int) -> bytes:
    return conversation_tag(tenant="", model="m", conversation=f"conversation-{number}")


def _story() -> Story:
    messages = [{"role": "user", "content": "Where is my order? " * 100}]
    body = msgspec.json.encode({"model": "m", "messages": messages})
    return story_of(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))


def num_steps(sizes: Sequence[int]) -> int:
    """How many steps :func:`measure` will tell of."""
    return 5 * len(sizes)


def measure(
    results: Results, *, sizes: Sequence[int], seed: int, step: Callable[[str], None]
) -> None:
    """Measure the map at each size."""
    for size in sizes:
        step(f"{size:,} conversations: memory")
        crowd, held = _weighed(size)
        _, alone = _weighed(1)
        results.add(
            {
                "row": "pressure_memory",
                "what": "router's map",
                "conversations": size,
                "bytes": (held - alone) / (size - 1),
            }
        )
        _operations(results, crowd, Random(seed), step)


def _operations(
    results: Results, crowd: Crowd, chance: Random, step: Callable[[str], None]
) -> None:
    size = len(crowd.directory)
    known = [chance.choice(crowd.tags) for _ in range(SAMPLES)]
    new = iter([_tag(-1 - number) for number in range(SAMPLES * ROUNDS)])
    snapshot = crowd.snapshot("d0")
    few = range(max(1, min(20, 20_000 // size)))
    step(f"{size:,} conversations: a turn")
    _timed(results, size, "a turn", known, crowd.turn)
    step(f"{size:,} conversations: a plan")
    _timed(results, size, "its plan alone", known, lambda tag: _plan(crowd, tag))
    step(f"{size:,} conversations: an engine's list")
    _timed(
        results,
        size,
        "a lease of an engine's list",
        few,
        lambda _: crowd.directory.replace("d0", snapshot, NOW),
        parts=len(snapshot.leases),
    )
    step(f"{size:,} conversations: newcomers")
    _timed(
        results,
        size,
        "a newcomer's turn",
        range(SAMPLES),
        lambda _: crowd.turn(next(new)),
    )


def _plan(crowd: Crowd, tag: bytes) -> None:
    asked = Turn(tag=tag, affinity=b"tools and system prompt")
    known = crowd.directory.find(tag)
    plan(asked, known, crowd.fleet(), NOW, crowd.experience.prices)


def _timed(
    results: Results,
    size: int,
    operation: str,
    arguments: Sequence[T],
    do: Callable[[T], object],
    parts: int = 1,
) -> None:
    """Add rows of what ``do`` takes, for each of the ``parts`` that it works at."""
    for repeat in range(ROUNDS):
        began = time.process_time()
        for argument in arguments:
            do(argument)
        us = (time.process_time() - began) / (len(arguments) * max(parts, 1)) * 1e6
        results.add(
            {
                "row": "pressure",
                "what": "router's map",
                "operation": operation,
                "conversations": size,
                "us": us,
                "repeat": repeat,
            }
        )


def _weighed(size: int) -> tuple[Crowd, int]:
    """A crowd, and the bytes that Python holds for it."""
    gc.collect()
    tracemalloc.start()
    crowd = Crowd.of(size)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return crowd, held
