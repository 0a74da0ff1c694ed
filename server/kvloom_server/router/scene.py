"""What watchers are shown, as JSON: a snapshot, and what changed since.

The page at ``/kvloom/`` and ``kvloom status`` show the same scene. A watcher's
whole state is one :class:`Seen`, so that a slow one costs nothing: it gets
everything that happened meanwhile at once, or a new snapshot.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from .chronicle import Chronicle
from .diagnosis import diagnose
from .directory import Directory
from .engines import Engine, Engines
from .feed import Feeds
from .memory import MemoryPoll, split
from .reasons import Bearing, meaning_of
from .receipts import Receipt
from .trend import Bucket

SHARED_S: Final = 0.2
MAX_LANES: Final = 24
MAX_DECISIONS: Final = 60

Json = dict[str, Any]


@dataclass(slots=True)
class Seen:
    """What one watcher has been shown."""

    num_receipts: int = 0
    state: bytes = b""
    """The rest of the scene, encoded."""


class Scene:
    """The router as its operator sees it."""

    def __init__(
        self,
        *,
        engines: Engines,
        directory: Directory,
        feeds: Feeds,
        chronicle: Chronicle,
        memory: MemoryPoll,
        num_waiting: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        """``num_waiting`` says how many turns wait for room at the engines."""
        self._engines = engines
        self._directory = directory
        self._feeds = feeds
        self._chronicle = chronicle
        self._num_waiting = num_waiting
        self._clock = clock
        self._began_unix = clock()
        self._shared: tuple[tuple[int, int], Json] = ((-1, 0), {})
        self.memory = memory

    def snapshot(self, seen: Seen | None = None) -> bytes:
        """All of it."""
        chronicle = self._chronicle
        receipts = chronicle.receipts
        state = self._state()
        if seen is not None:
            seen.num_receipts = receipts.num_added
            seen.state = msgspec.json.encode(state)
        trend = chronicle.trend
        whole = {
            "now": self._clock(),
            "began": self._began_unix,
            "window_s": trend.window_s,
            "bucket_s": trend.bucket_s,
            "receipts": list(map(as_json, receipts.recent()[-MAX_DECISIONS:])),
            "lanes": [
                {"conversation": tag, "turns": list(map(as_json, turns))}
                for tag, turns in receipts.lanes(MAX_LANES)
            ],
            **state,
        }
        return msgspec.json.encode(whole)

    def changes(self, seen: Seen) -> tuple[str, bytes] | None:
        """What this watcher has not been shown, and its kind: ``delta``, or
        ``snapshot`` when it missed too much; ``None`` when nothing changed."""
        new = self._chronicle.receipts.since(seen.num_receipts)
        if new is None:
            return "snapshot", self.snapshot(seen)
        state = self._recent_state()
        encoded = msgspec.json.encode(state)
        if not new and encoded == seen.state:
            return None
        seen.num_receipts += len(new)
        seen.state = encoded
        delta = {"now": self._clock(), "receipts": list(map(as_json, new)), **state}
        return "delta", msgspec.json.encode(delta)

    def explain(self, conversation: str) -> Json | None:
        """What became of a conversation's last turns, by its tag."""
        turns = self._chronicle.receipts.of(conversation)
        known = self._directory.find(bytes.fromhex(conversation))
        if not turns and known is None:
            return None
        now = self._clock()
        leases = known.leases if known is not None else ()
        return {
            "conversation": conversation,
            "summary": _summary(turns),
            "leases": [
                {
                    "engine": lease.engine,
                    "tokens": lease.num_tokens,
                    "expires_in_s": round(max(lease.deadline_unix - now, 0.0), 1),
                }
                for lease in leases
            ],
            "turns": [
                as_json(each) | {"advice": _advice(each)} for each in reversed(turns)
            ],
        }

    def _recent_state(self) -> Json:
        """The state, made once for all watchers that ask at about the same time."""
        key = (self._chronicle.receipts.num_added, int(self._clock() / SHARED_S))
        if key != self._shared[0]:
            self._shared = (key, self._state())
        return self._shared[1]

    def _state(self) -> Json:
        """What changes other than by a turn's end."""
        now = self._clock()
        trend = self._chronicle.trend
        return {
            "engines": self._engine_rows(),
            "conversations": len(self._directory),
            "waiting": self._num_waiting(),
            "underway": [
                {"conversation": each.conversation, "began": each.began_unix}
                for each in self._chronicle.underway()
            ],
            "diagnosis": msgspec.to_builtins(diagnose(trend.total(now))),
            "ttft": _ttft(self._chronicle.receipts.recent()),
            "buckets": list(map(_bucket, trend.buckets(now))),
        }

    def _engine_rows(self) -> list[Json]:
        feeds = self._feeds.report()
        return [
            self._engine_row(engine, role, feeds.get(engine.name))
            for role, engines in self._engines.by_role()
            for engine in engines
        ]

    def _engine_row(self, engine: Engine, role: str, feed: str | None) -> Json:
        num_leases = self._directory.num_leases(engine.name)
        reading = self.memory.of(engine.name)
        memory = None
        if reading is not None:
            # Prefill leases nothing, so that its feed has nothing to say.
            known = num_leases if feed == "live" and role == "decode" else None
            memory = msgspec.to_builtins(split(reading, num_leases=known))
        return {
            "name": engine.name,
            "role": role,
            "url": engine.spec.url,
            "state": engine.condition,
            "feed": feed,
            "in_flight": engine.num_in_flight,
            "conversations": self._directory.num_bound(engine.name),
            "leases": num_leases,
            "memory": memory,
        }


def as_json(receipt: Receipt) -> Json:
    """One receipt, flat."""
    report, meaning = receipt.report, meaning_of(receipt)
    return {
        "number": receipt.number,
        "at": receipt.at_unix,
        "turn": receipt.turn,
        "conversation": receipt.conversation,
        "model": receipt.model,
        "route": receipt.route,
        "outcome": receipt.outcome,
        "plan": report.plan,
        "reason": report.reason,
        "bearing": meaning.bearing,
        "why": meaning.text,
        "prefill": report.prefill,
        "decode": report.decode,
        "prompt_tokens": report.prompt_tokens,
        "local_tokens": report.local_tokens,
        "returned_tokens": report.returned_tokens,
        "computed_tokens": report.computed_tokens,
        "ttft_s": receipt.ttft_s,
        "prefill_s": receipt.prefill_s,
        "decode_s": receipt.decode_s,
        "overhead_s": receipt.overhead_s,
        "total_s": receipt.total_s,
        "retries": receipt.retries,
        "lease_tokens": receipt.lease_tokens,
        "history_tokens": receipt.history_tokens,
    }


def _advice(receipt: Receipt) -> str:
    meaning = meaning_of(receipt)
    return meaning.advice if meaning.bearing is Bearing.MISSED else ""


def _summary(turns: Sequence[Receipt]) -> str:
    if not turns:
        return "No turn of it since the router started; its KV is known from engines."
    last = turns[-1]
    reused, prompt = last.reused_tokens, last.report.prompt_tokens
    if reused is None or not prompt:
        amount = "how much was reused is not known"
    else:
        amount = f"{reused} of {prompt} prompt tokens reused"
    return f"Last turn: {amount}. {meaning_of(last).text}"


def _bucket(bucket: Bucket) -> Json:
    return {
        "start": bucket.start_unix,
        "turns": bucket.turns,
        "local": bucket.local_tokens,
        "returned": bucket.returned_tokens,
        "computed": bucket.computed_tokens,
    }


def _ttft(receipts: Iterable[Receipt]) -> Json:
    """Time to first token over the recent turns, seconds."""
    times = sorted(each.ttft_s for each in receipts if each.ttft_s is not None)
    if not times:
        return {"median": None, "p95": None}
    return {
        "median": statistics.median(times),
        "p95": times[math.ceil(0.95 * len(times)) - 1],
    }
