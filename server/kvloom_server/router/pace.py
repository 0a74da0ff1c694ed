"""What the router has learned of each conversation: its pauses, its size. Pure.

Takes ``now`` and does no I/O. Losing it costs an estimate, never an answer, so
the least recently used are dropped beyond a bound.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
from msgspec.structs import replace

from .estimate import UNKNOWN_NEW_TOKENS
from .story import Mark, Reading, Story, read

MAX_MARKS: Final = 16
"""Turns of a conversation that a request may go on from: forks and branches, as
many as there are leases."""
CAUTION: Final = 1.5
"""New tokens are taken for so many times what the conversation's own bytes a
token say: other languages and code have more tokens in as many bytes."""
FRAME_TOKENS: Final = 16
"""What a chat template puts around messages, and a last block that is computed
again because it is not full."""
SMOOTHING: Final = 0.3
"""Weight of the newest pause in a conversation's mean."""
MAX_GAP_S: Final = 86_400.0


class Gaps(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Pauses between turns, smoothed. Seconds."""

    mean_s: float
    deviation_s: float
    count: int = 1

    @property
    def short_s(self) -> float:
        """What a pause will hardly fall below."""
        return max(self.mean_s - 2 * self.deviation_s, 0.0)

    def after(self, gap_s: float) -> "Gaps":
        """With one more pause."""
        miss = gap_s - self.mean_s
        return Gaps(
            mean_s=self.mean_s + SMOOTHING * miss,
            deviation_s=self.deviation_s + SMOOTHING * (abs(miss) - self.deviation_s),
            count=self.count + 1,
        )


class Pace(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One conversation."""

    ended: float | None = None
    """When its last turn ended; ``None`` while a turn is under way."""
    gaps: Gaps | None = None
    bytes_per_token: float | None = None
    prefilled_tokens: int = 0
    """Of the last prompt that prefill had, which it may have cached."""
    num_new: int | None = None
    """Tokens after the history, of the last turn that went on from one."""
    marks: tuple[tuple[str, Mark], ...] = ()
    """By turn id, newest first."""


@dataclass(slots=True)
class Paces:
    """All conversations, least recently used first."""

    max_conversations: int
    _paces: OrderedDict[bytes, Pace] = field(default_factory=OrderedDict)
    _usual: Gaps | None = None
    """The pauses of all conversations."""
    _usual_new: int = UNKNOWN_NEW_TOKENS
    """New tokens of the last turn of any conversation."""

    def __len__(self) -> int:
        return len(self._paces)

    def find(self, tag: bytes) -> Pace:
        """What is known of a conversation."""
        return self._paces.get(tag, _NOTHING)

    def forget(self, tag: bytes) -> None:
        """The conversation is over."""
        self._paces.pop(tag, None)

    def began(self, tag: bytes, now: float) -> float | None:
        """A turn has come; the pause before it, if one is known."""
        known = self.find(tag)
        if known.ended is None:
            return None
        gap_s = min(max(now - known.ended, 0.0), MAX_GAP_S)
        gaps = _with(known.gaps, gap_s)
        self._usual = _with(self._usual, gap_s)
        self._put(tag, replace(known, ended=None, gaps=gaps))
        return gap_s

    def prefilled(self, tag: bytes, *, num_bytes: int, num_tokens: int) -> None:
        """Prefill counted the tokens of a prompt of so many bytes."""
        if num_bytes <= 0 or num_tokens <= 0:
            return
        known = self.find(tag)
        self._put(
            tag,
            replace(
                known,
                bytes_per_token=num_bytes / num_tokens,
                prefilled_tokens=num_tokens,
            ),
        )

    def ended(self, tag: bytes, *, turn_id: str, mark: Mark, now: float) -> None:
        """A turn was answered in full."""
        known = self.find(tag)
        others = [other for other in known.marks if other[0] != turn_id]
        marks = ((turn_id, mark), *others)[:MAX_MARKS]
        self._put(tag, replace(known, ended=now, marks=marks))

    def read(self, tag: bytes, story: Story) -> Reading:
        """Compare a request with the conversation's last turns."""
        return read(story, dict(self.find(tag).marks))

    def new_tokens(self, tag: bytes, reading: Reading) -> dict[str, int]:
        """Turns that this request goes on from, and how many tokens are new.

        An estimate, on the high side: only speed hangs on it.
        """
        known = self.find(tag)
        if known.bytes_per_token is None:
            return {}
        per_token = max(known.bytes_per_token, 1.0)
        return {
            turn_id: FRAME_TOKENS + round(CAUTION * num_bytes / per_token)
            for turn_id, num_bytes in reading.news.items()
        }

    def grew(self, tag: bytes, news: Mapping[str, int]) -> None:
        """A turn has come that goes on from these turns, with so much new."""
        if news:
            self._usual_new = min(news.values())
            self._put(tag, replace(self.find(tag), num_new=self._usual_new))

    def expected_new(self, tag: bytes) -> int:
        """New tokens of the next turn: as many as of the last; before there was
        one, as many as in other conversations."""
        known = self.find(tag).num_new
        return self._usual_new if known is None else known

    def gaps(self, tag: bytes) -> Gaps | None:
        """The conversation's pauses; before it had any, everybody's."""
        return self.find(tag).gaps or self._usual

    def _put(self, tag: bytes, pace: Pace) -> None:
        self._paces[tag] = pace
        self._paces.move_to_end(tag)
        while len(self._paces) > self.max_conversations:
            self._paces.popitem(last=False)


_NOTHING: Final = Pace()


def _with(gaps: Gaps | None, gap_s: float) -> Gaps:
    if gaps is None:
        return Gaps(mean_s=gap_s, deviation_s=gap_s / 4)
    return gaps.after(gap_s)
