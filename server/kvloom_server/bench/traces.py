"""Recorded agent sessions, in a file of JSON lines. Pure but for reading the file.

One session a line::

    {"session": "a1", "messages": […], "tools": […], "gaps_s": [2.5, 0.8]}

``messages`` are OpenAI's, tool calls and results with them; ``tools`` what the model
may call; ``gaps_s`` how long each tool ran or person thought, before each request
after the first. All but ``messages`` may be left out.

A session is *replayed*: each turn's history holds the model's own answers, and only
what others said (people, tools) is taken from the record.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import msgspec

from .talks import Message

CALL_TOKENS: Final = 80
SAY_TOKENS: Final = 24
"""Longest answers with a tool call, and in words: a replay measures what comes before
an answer, not the answer."""
LENGTH_STEP: Final = 500


class TraceError(ValueError):
    """A file that is no trace; the message names the line."""


class Session(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One recorded conversation."""

    session: str = ""
    """Its name; the line's number where there is none."""
    messages: list[Message]
    tools: list[Message] = []
    gaps_s: list[float] = []


def read_sessions(file: Path, *, limit: int | None = None) -> list[Session]:
    """The sessions of a trace, the first ``limit`` of them.

    Raises:
        TraceError: a line is no session.
        OSError: the file can't be read.
    """
    sessions: list[Session] = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(sessions) >= limit:
                break
            if line.strip():
                sessions.append(_session(line, f"{file.name}, line {number}"))
    if not sessions:
        raise TraceError(f"{file} holds no session")
    return sessions


def _session(line: bytes, where: str) -> Session:
    try:
        session = msgspec.json.decode(line, type=Session)
    except msgspec.DecodeError as error:
        raise TraceError(f"{where}: {error}") from error
    for message in session.messages:
        if not isinstance(message.get("role"), str):
            raise TraceError(f"{where}: a message has no role")
    if not session.messages or session.messages[0]["role"] == "assistant":
        raise TraceError(f"{where}: it does not begin with what is said to the model")
    if any(gap < 0 for gap in session.gaps_s):
        raise TraceError(f"{where}: a gap is below 0 s")
    session.session = session.session or where
    return session


def write_sessions(file: Path, sessions: Sequence[Session]) -> None:
    """Write a trace."""
    file.write_bytes(b"".join(msgspec.json.encode(s) + b"\n" for s in sessions))


@dataclass(frozen=True, slots=True)
class Replay:
    """A recorded session as a conversation to be played.

    Args:
        name: of the conversation.
        said: what others said before each turn.
        calls: whether the recorded answer to each turn called a tool.
        tools: what may be called.
        pauses_s: before each turn; the first is 0.
    """

    name: str
    said: tuple[tuple[Message, ...], ...]
    calls: tuple[bool, ...]
    tools: tuple[Message, ...]
    pauses_s: tuple[float, ...]

    @property
    def opening(self) -> tuple[Message, ...]:
        """The first turn's messages."""
        return self.said[0]

    @property
    def prefix_tokens(self) -> int:
        """About so long is the first prompt: four characters a token, in steps, so
        that sessions of about one length share a row of a table."""
        shown = [*self.opening, *self.tools]
        num_tokens = sum(len(msgspec.json.encode(each)) for each in shown) / 4
        return max(round(num_tokens / LENGTH_STEP), 1) * LENGTH_STEP

    @property
    def num_turns(self) -> int:
        return len(self.said)

    def pause_s(self, turn: int) -> float:
        """How long others took before this turn (from 0)."""
        return self.pauses_s[turn]

    def prompt(self, turn: int) -> dict[str, Any]:
        """The fields of a request that a turn (from 0) has besides its messages."""
        does_call = self.calls[turn] and bool(self.tools)
        fields: dict[str, Any] = {
            "max_tokens": CALL_TOKENS if does_call else SAY_TOKENS
        }
        if self.tools:
            fields["tools"] = list(self.tools)
            fields["tool_choice"] = "required" if does_call else "none"
        return fields

    def next_messages(
        self, messages: Sequence[Message], answer: Message, turn: int
    ) -> list[Message]:
        """The history of ``turn``, after the model's answer to the turn before.

        Recorded results go to the model's own calls, in order; what is left over
        is said by the user, as a model that called nothing must hear it too.
        """
        said = self.said[turn]
        results = [str(m.get("content") or "") for m in said if m["role"] == "tool"]
        calls = answer.get("tool_calls") or ()
        following: list[Message] = []
        for call, result in zip_longest(calls, results):
            if call is not None:
                text = result if result is not None else ""
                following.append(
                    {"role": "tool", "tool_call_id": call["id"], "content": text}
                )
            else:
                following.append({"role": "user", "content": result})
        others = [m for m in said if m["role"] != "tool"]
        return [*messages, answer, *following, *others]


def replayed(
    session: Session, *, gap_scale: float = 1.0, default_gap_s: float = 0.0
) -> Replay:
    """A session, ready to be played.

    Args:
        session: the record.
        gap_scale: recorded pauses take so many times as long.
        default_gap_s: a pause that was not recorded; not scaled.
    """
    said: list[list[Message]] = [[]]
    calls: list[bool] = []
    for message in session.messages:
        if message["role"] != "assistant":
            said[-1].append(_heard(message))
        elif said[-1]:  # two answers in a row are one
            calls.append(bool(message.get("tool_calls")))
            said.append([])
        else:
            calls[-1] = calls[-1] or bool(message.get("tool_calls"))
    if not said[-1]:
        said.pop()
    while len(calls) < len(said):
        calls.append(False)
    gaps = [gap_scale * gap for gap in session.gaps_s[: len(said) - 1]]
    gaps += [default_gap_s] * (len(said) - 1 - len(gaps))
    return Replay(
        name=session.session,
        said=tuple(map(tuple, said)),
        calls=tuple(calls),
        tools=tuple(session.tools),
        pauses_s=(0.0, *gaps),
    )


def _heard(message: Message) -> Message:
    """Only what a model is told: recorders add fields of their own."""
    return {
        name: message[name]
        for name in ("role", "content", "tool_call_id")
        if message.get(name) is not None
    }
