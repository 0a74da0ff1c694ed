"""Many turns of many conversations on a decode engine that is far too small.

``make soak`` plays at least 300 turns; ``make test`` plays 60.
"""

import os
import random
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pair import Answer, Messages, Pair

NUM_TURNS = int(os.environ.get("KVLOOM_SOAK_TURNS", "60"))
NUM_CONVERSATIONS = min(40, NUM_TURNS // 4)
AT_ONCE = 4
# `make soak` is for a quiet machine. Elsewhere a slow one is no failure, and only a
# request that is stuck is.
LONGEST_WAIT_S = 5 if "KVLOOM_SOAK_TURNS" in os.environ else 60
WORDS = ("river", "bread", "stone", "letter", "garden", "winter", "violin", "harbour")


@dataclass
class Conversation:
    """One conversation under way, and what happened in it."""

    number: int
    dice: random.Random
    messages: Messages = field(default_factory=list)
    num_returned: int = 0
    num_checked: int = 0

    @property
    def name(self) -> str:
        return f"soak-{self.number}-{RUN}"

    def words(self, count: int) -> str:
        return " ".join(self.dice.choices(WORDS, k=count))

    def play(self, pair: Pair, num_turns: int) -> None:
        self.messages = [
            {"role": "system", "content": f"{self.name} {self.words(150)}"},
            {"role": "user", "content": self.words(10)},
        ]
        for _ in range(num_turns):
            self.turn(pair)

    def turn(self, pair: Pair) -> None:
        act = self.dice.choices(
            [self.plain, self.streamed, self.stopped, self.broken_off], [4, 4, 1, 1]
        )[0]
        answer = act(pair)
        if answer is not None:
            self.num_returned += answer.plan.returned_tokens or 0
            self.messages.append({"role": "assistant", "content": answer.text or ""})
        change = self.dice.random()
        if change < 0.1 and len(self.messages) > 3:
            self.messages[2] = {"role": "assistant", "content": self.words(8)}
        elif change < 0.2:
            del self.messages[2:]
        self.messages.append({"role": "user", "content": self.words(40)})

    def plain(self, pair: Pair) -> Answer:
        answer = pair.ask(self.messages, self.name, max_tokens=12)
        if self.dice.random() < 0.2:
            assert answer.token_ids == pair.oracle(self.messages, max_tokens=12)
            self.num_checked += 1
        return answer

    def streamed(self, pair: Pair) -> Answer:
        return pair.stream(self.messages, self.name, max_tokens=12)

    def stopped(self, pair: Pair) -> Answer:
        return pair.stream(self.messages, self.name, max_tokens=12, stop=["e"])

    def broken_off(self, pair: Pair) -> None:
        stream = pair.client.chat.completions.create(
            model=pair.model,
            messages=self.messages,  # type: ignore[arg-type]
            max_tokens=60,
            stream=True,
            extra_headers={"X-Session-ID": self.name},
        )
        next(iter(stream))
        stream.close()


RUN = uuid.uuid4().hex[:8]


def test_a_small_decode_engine_serves_everybody_for_a_long_time(
    pair: Pair, record_property: Any
) -> None:
    """No error, no request that waits long, nothing held at the end, right answers."""
    waited = _waits(pair)
    each = -(-NUM_TURNS // NUM_CONVERSATIONS)
    conversations = [
        Conversation(number=number, dice=random.Random(number))
        for number in range(NUM_CONVERSATIONS)
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        played = [pool.submit(c.play, pair, each) for c in conversations]
        for one in played:
            one.result()
    assert sum(c.num_returned for c in conversations) > 0
    assert sum(c.num_checked for c in conversations) > 0
    for url, (num_before, num_short_before) in waited.items():
        num, num_short = _waits(pair)[url]
        assert num - num_before == num_short - num_short_before, (
            f"a request waited longer than {LONGEST_WAIT_S} s at {url}"
        )
    record_property("turns", each * NUM_CONVERSATIONS)
    record_property("returned", sum(c.num_returned for c in conversations))


def _waits(pair: Pair) -> dict[str, tuple[float, float]]:
    """Requests that an engine ever queued, and those that waited shortly."""
    name = "vllm:request_queue_time_seconds"
    short = f'le="{LONGEST_WAIT_S:.1f}"'
    return {
        url: (
            pair.metric(url, f"{name}_count"),
            pair.metric(url, f"{name}_bucket", having=short),
        )
        for url in (pair.prefill, pair.decode)
    }
