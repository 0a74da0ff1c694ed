"""What people have recorded, as sessions of ``traces.py``. Pure.

- ``openai``: chat logs, one JSON object a line with ``messages`` (and ``tools``), as
  fine-tuning files and most gateways write them;
- ``tau``: tau-bench's trajectories, a list of objects with ``traj``;
- ``swe-agent``: a ``.traj`` file with ``history``;
- ``mooncake``: request traces with ``timestamp``, ``input_length``, ``hash_ids``:
  their text is unknown, so each block becomes text of its own, the same for the same
  block.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from itertools import pairwise
from typing import Any, Final, TypeVar

import msgspec

from .talks import Message
from .traces import Session, TraceError

T = TypeVar("T")

BLOCK_TOKENS: Final = 512
"""Of one of Mooncake's hash ids (its paper, FAST '25)."""
SHARED_BLOCKS: Final = 2
"""Fewer blocks in common are a system prompt, not a conversation."""
_WORDS: Final = ("amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "heron")


def from_openai(data: bytes) -> list[Session]:
    """Chat logs."""
    sessions = []
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        record = _object(line, f"line {number}")
        name = record.get("session") or record.get("id") or f"line-{number}"
        sessions.append(
            Session(
                session=str(name),
                messages=_messages(record.get("messages"), f"line {number}"),
                tools=record.get("tools") or [],
                gaps_s=record.get("gaps_s") or [],
            )
        )
    return sessions


def from_tau(data: bytes) -> list[Session]:
    """tau-bench's trajectories."""
    return [
        Session(
            session=f"tau-{run.get('task_id', number)}-{run.get('trial', 0)}",
            messages=_messages(run.get("traj"), f"run {number}"),
        )
        for number, run in enumerate(_decoded(data, list[dict[str, Any]], "the file"))
    ]


def from_swe_agent(data: bytes) -> list[Session]:
    """One of SWE-agent's trajectories."""
    record = _object(data, "the file")
    messages: list[Message] = []
    for message in _messages(record.get("history"), "history"):
        kept: Message = {"role": message["role"], "content": _text(message["content"])}
        if message.get("tool_calls"):
            kept["tool_calls"] = message["tool_calls"]
        if ids := message.get("tool_call_ids"):
            kept["tool_call_id"] = ids[0]
        messages.append(kept)
    return [Session(session=str(record.get("environment", "swe")), messages=messages)]


def from_mooncake(data: bytes) -> list[Session]:
    """Mooncake's request traces.

    A request whose blocks begin with all whole blocks of an earlier one is that
    one's next turn, and what was new in it is a user's message.
    """
    open_turns: dict[tuple[int, ...], _Growing] = {}
    sessions: list[_Growing] = []
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        request = _decoded(line, _Request, f"line {number}")
        blocks = tuple(request.hash_ids)
        before = _longest(open_turns, blocks)
        growing = open_turns.pop(before) if before is not None else None
        if growing is None:
            growing = _Growing(name=f"mooncake-{number}")
            sessions.append(growing)
        growing.add(request, blocks[len(before or ()) :])
        # The last block is not full: the next turn's one has another id.
        open_turns[blocks[:-1]] = growing
    return [each.session() for each in sessions]


class _Request(msgspec.Struct):
    timestamp: float
    """Milliseconds."""
    hash_ids: list[int]


class _Growing:
    """A session that requests are added to."""

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._texts: list[str] = []
        self._times_s: list[float] = []

    def add(self, request: _Request, new_blocks: tuple[int, ...]) -> None:
        self._texts.append(" ".join(map(_block_text, new_blocks)) or "Go on.")
        self._times_s.append(request.timestamp / 1000)

    def session(self) -> Session:
        messages: list[Message] = []
        for text in self._texts:
            messages += [
                {"role": "user", "content": text},
                {"role": "assistant", "content": ""},
            ]
        times = self._times_s
        gaps = [max(later - sooner, 0.0) for sooner, later in pairwise(times)]
        return Session(session=self._name, messages=messages, gaps_s=gaps)


def _longest(
    turns: Mapping[tuple[int, ...], _Growing], blocks: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The longest of ``turns`` that ``blocks`` begins with."""
    sizes = range(len(blocks), SHARED_BLOCKS - 1, -1)
    return next((blocks[:n] for n in sizes if blocks[:n] in turns), None)


def _block_text(block: int) -> str:
    chance = random.Random(block)
    return " ".join(chance.choice(_WORDS) for _ in range(BLOCK_TOKENS // 2))


class Recording(StrEnum):
    """What can be converted."""

    OPENAI = "openai"
    TAU = "tau"
    SWE_AGENT = "swe-agent"
    MOONCAKE = "mooncake"


CONVERTERS: Final[dict[Recording, Callable[[bytes], list[Session]]]] = {
    Recording.OPENAI: from_openai,
    Recording.TAU: from_tau,
    Recording.SWE_AGENT: from_swe_agent,
    Recording.MOONCAKE: from_mooncake,
}


def _object(data: bytes, where: str) -> dict[str, Any]:
    return _decoded(data, dict[str, Any], where)


def _decoded(data: bytes, kind: type[T], where: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise TraceError(f"{where}: {error}") from error


def _messages(value: object, where: str) -> list[Message]:
    """The messages from the first that is said to the model."""
    if not isinstance(value, list) or not value:
        raise TraceError(f"{where}: it has no messages")
    for message in value:
        if not isinstance(message, dict) or "role" not in message:
            raise TraceError(f"{where}: a message has no role")
    begin = next((n for n, m in enumerate(value) if m["role"] != "assistant"), None)
    if begin is None:
        raise TraceError(f"{where}: nothing is said to the model")
    return value[begin:]


def _text(content: object) -> str:
    """A message's text, also where it comes in parts."""
    if not isinstance(content, list):
        return str(content or "")
    parts: Iterable[object] = (p.get("text") for p in content if isinstance(p, dict))
    return "".join(str(part) for part in parts if part)
