"""What is kept of finished turns: who did them, what was reused, how long it took.

Pure ring buffers. A receipt has no prompt, no answer, no handle and no
conversation ID, only the tag that stands for it.
"""

from collections import OrderedDict, deque
from typing import Final

import msgspec

from kvloom.protocol import PlanReport

ANSWERED: Final = frozenset({"ok", "client_gone"})
"""Outcomes that are nobody's failure."""
MAX_RECENT: Final = 256
MAX_CONVERSATIONS: Final = 256
MAX_TURNS: Final = 32
"""Of one conversation; its last ones."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """One finished turn. Times in seconds; ``None`` where it never came so far."""

    number: int
    """Counts the router's turns, in the order of their ends."""
    at_unix: float
    """When the request arrived."""
    turn: str
    """The turn's id, which is also its lease's and in the engines' logs."""
    conversation: str | None
    """The conversation's tag, 16 hexadecimal digits; ``None``: it had none."""
    model: str
    route: str
    """The endpoint's path."""
    outcome: str
    """``ok``, or how else it ended; the labels of ``kvloom_requests_total``."""
    report: PlanReport
    prefill_s: float | None = None
    """All attempts of the prefill leg."""
    decode_s: float | None = None
    """To the first byte of the decode leg that answered."""
    answered_s: float | None = None
    """To the answer's first byte; ``None``: nothing came."""
    ttft_s: float | None = None
    """The same of a stream; a whole answer's first byte says nothing of its first
    token."""
    overhead_s: float | None = None
    """What of ``answered_s`` was the router's own."""
    total_s: float = 0.0
    retries: int = 0
    """Engines that were tried and did not answer."""
    lease_tokens: int | None = None
    """What the lease that the plan named holds, or prefill that is warm."""
    history_tokens: int | None = None
    """The prompt of the conversation's turn before: so much of this one, or all
    of it, could have been reused."""

    @property
    def reused_tokens(self) -> int | None:
        """Prompt tokens that nobody computed; ``None`` where it is not known."""
        local, returned = self.report.local_tokens, self.report.returned_tokens
        if local is None and returned is None:
            return None
        return (local or 0) + (returned or 0)

    @property
    def is_answered(self) -> bool:
        """Whether its client got what it waited for, or left."""
        return self.outcome in ANSWERED


class Receipts:
    """The last receipts of all turns, and of each of the last conversations."""

    def __init__(
        self,
        *,
        max_recent: int = MAX_RECENT,
        max_conversations: int = MAX_CONVERSATIONS,
        max_turns: int = MAX_TURNS,
    ) -> None:
        self._max_conversations = max_conversations
        self._max_turns = max_turns
        self._recent: deque[Receipt] = deque(maxlen=max_recent)
        self._lanes: OrderedDict[str, deque[Receipt]] = OrderedDict()
        self.num_added = 0
        """The next receipt's number."""

    def __repr__(self) -> str:
        return f"Receipts({self.num_added} added, {len(self._lanes)} conversations)"

    def add(self, receipt: Receipt) -> None:
        """Keep a receipt; the oldest leave.

        Args:
            receipt: its number is ``num_added``.
        """
        assert receipt.number == self.num_added, "receipts are numbered in order"
        self.num_added += 1
        self._recent.append(receipt)
        if receipt.conversation is None:
            return
        lane = self._lanes.setdefault(
            receipt.conversation, deque(maxlen=self._max_turns)
        )
        lane.append(receipt)
        self._lanes.move_to_end(receipt.conversation)
        if len(self._lanes) > self._max_conversations:
            self._lanes.popitem(last=False)

    def recent(self) -> list[Receipt]:
        """The last receipts, oldest first."""
        return list(self._recent)

    def since(self, number: int) -> list[Receipt] | None:
        """Receipts from ``number`` on, oldest first; ``None`` when some of them
        are not kept any more."""
        if number >= self.num_added:
            return []
        if not self._recent or self._recent[0].number > number:
            return None
        return [receipt for receipt in self._recent if receipt.number >= number]

    def of(self, conversation: str) -> list[Receipt]:
        """The last turns of one conversation, by its tag, oldest first."""
        return list(self._lanes.get(conversation, ()))

    def last_of(self, conversation: str) -> Receipt | None:
        """The last turn of one conversation, by its tag."""
        lane = self._lanes.get(conversation)
        return lane[-1] if lane else None

    def lanes(self, limit: int) -> list[tuple[str, list[Receipt]]]:
        """The conversations that spoke last, the last one first."""
        tags = list(reversed(self._lanes))[:limit]
        return [(tag, list(self._lanes[tag])) for tag in tags]

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when a bound or an order does not hold."""
        numbers = [receipt.number for receipt in self._recent]
        assert numbers == sorted(set(numbers)), "recent receipts are in order"
        assert len(self._lanes) <= self._max_conversations, "too many conversations"
        for tag, lane in self._lanes.items():
            assert len(lane) <= self._max_turns, "too many turns"
            assert all(receipt.conversation == tag for receipt in lane)
