"""What the router remembers of a conversation: its pauses, and what is new."""

import gc
import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvloom_server.router.estimate import UNKNOWN_NEW_TOKENS
from kvloom_server.router.pace import MAX_GAP_S, MAX_MARKS, Gaps, Paces
from kvloom_server.router.story import Mark, Story, read, story_of

TAG = b"8 bytes."
SYSTEM = {"role": "system", "content": "You are kind. " * 20}
QUESTION = {"role": "user", "content": "Where is it? " * 10}
ANSWER = {"role": "assistant", "content": "It is there. " * 10}
NEXT = {"role": "user", "content": "Thank you."}


def story(*messages: dict[str, Any], **fields: Any) -> Story:
    return parsed(json.dumps({"messages": messages, **fields}).encode())


def parsed(body: bytes) -> Story:
    return story_of(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))


def mark(told: Story) -> Mark:
    return read(told, {}).mark


def news(told: Story, marks: dict[str, Mark]) -> dict[str, int]:
    return dict(read(told, marks).news)


def new_tokens(known: Paces, told: Story) -> dict[str, int]:
    return known.new_tokens(TAG, known.read(TAG, told))


def paces(size: int = 10) -> Paces:
    return Paces(max_conversations=size)


def test_what_follows_the_answer_is_new() -> None:
    """The answer is in the lease; only the message after it has to be computed."""
    first = story(SYSTEM, QUESTION)
    second = story(SYSTEM, QUESTION, ANSWER, NEXT)
    assert news(second, {"turn": mark(first)}) == {"turn": len(json.dumps(NEXT))}


def test_a_changed_history_goes_on_from_nothing() -> None:
    """An edited message, other tools or another tenant's salt: no turn is
    continued, however much of it is the same."""
    marks = {"turn": mark(story(SYSTEM, QUESTION))}
    edited = QUESTION | {"content": "Where is it! " * 10}
    assert news(story(SYSTEM, edited, ANSWER, NEXT), marks) == {}
    assert news(story(SYSTEM), marks) == {}
    whole = (SYSTEM, QUESTION, ANSWER, NEXT)
    assert news(story(*whole, tools=[{"type": "function"}]), marks) == {}
    assert news(story(*whole, cache_salt="s"), marks) == {}


def test_the_frame_does_not_run_into_itself() -> None:
    """Where one field ends and the next begins is part of the history."""
    model, tools = story(QUESTION, model="a"), story(QUESTION, tools="a")
    assert mark(model) != mark(tools)


texts = st.text(max_size=8)
roles = st.sampled_from(["user", "assistant", "tool"])
histories = st.lists(
    st.fixed_dictionaries({"role": roles, "content": texts}), max_size=6
)


@given(histories, histories, st.sampled_from([None, 1]))
def test_only_a_true_continuation_counts(
    old: list[Any], new: list[Any], indent: int | None
) -> None:
    """A story goes on from another one exactly if it begins with all its
    messages; what is new is what follows the answer, however it is written."""
    before, after, longer = (
        parsed(json.dumps({"messages": m}, indent=indent).encode())
        for m in (old, new, old + new)
    )
    written = [list(map(json.dumps, messages)) for messages in (old, new)]
    goes_on = bool(old) and written[1][: len(old)] == written[0]
    assert (news(after, {"t": mark(before)}) != {}) == goes_on
    found = news(longer, {"t": mark(before)})
    assert (found != {}) == bool(old)
    answer = bool(new) and new[0]["role"] == "assistant"
    if old:
        assert bool(found["t"]) == (len(new) > answer)


def test_bodies_that_are_no_chat_have_no_story() -> None:
    """Prompts and nonsense are never taken for a continuation."""
    for body in (b'{"prompt":"x"}', b'{"messages":5}', b'{"messages":"x"}', b"{}"):
        told = story_of(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
        assert news(told, {"t": mark(told)}) == {}


def test_new_tokens_are_counted_on_the_high_side() -> None:
    """The estimate knows the conversation's own bytes a token, and adds to it."""
    known = paces()
    first = story(SYSTEM, QUESTION)
    known.prefilled(TAG, num_bytes=len(first.text), num_tokens=len(first.text) // 4)
    known.ended(TAG, turn_id="t", mark=mark(first), now=0)
    found = new_tokens(known, story(SYSTEM, QUESTION, ANSWER, NEXT))
    assert len(json.dumps(NEXT)) / 4 < found["t"] < len(json.dumps(NEXT))


def test_nothing_is_estimated_before_tokens_were_counted() -> None:
    """Without a count there is no estimate, so that nothing is risked on it."""
    known = paces()
    first = story(SYSTEM, QUESTION)
    known.ended(TAG, turn_id="t", mark=mark(first), now=0)
    assert new_tokens(known, story(SYSTEM, QUESTION, ANSWER, NEXT)) == {}


def test_branches_are_remembered_up_to_a_bound() -> None:
    """A fork may go on from an older turn, as long as there are not too many."""
    known = paces()
    first = story(SYSTEM, QUESTION)
    known.prefilled(TAG, num_bytes=100, num_tokens=25)
    count = MAX_MARKS + 6
    for i in range(count):
        known.ended(TAG, turn_id=f"t{i}", mark=mark(first), now=0)
    newest = {f"t{i}" for i in range(count - MAX_MARKS, count)}
    assert set(new_tokens(known, first)) == newest
    assert len(known.find(TAG).marks) == MAX_MARKS


def test_pauses_are_learned() -> None:
    """A conversation whose tools take ten seconds is expected back in ten."""
    known = paces()
    now = 0.0
    assert known.began(TAG, now) is None
    for _ in range(30):
        known.ended(TAG, turn_id="t", mark=mark(story(QUESTION)), now=now)
        now += 10
        assert known.began(TAG, now) == 10
    gaps = known.gaps(TAG)
    assert gaps is not None
    assert 9 < gaps.short_s <= gaps.mean_s == 10


def test_a_turn_that_never_ended_leaves_no_pause() -> None:
    """Retries and aborted turns are not the user's pauses."""
    known = paces()
    known.ended(TAG, turn_id="t", mark=mark(story(QUESTION)), now=0)
    assert known.began(TAG, 5) == 5
    assert known.began(TAG, 6) is None


def test_a_new_conversation_is_taken_for_a_usual_one() -> None:
    """What other conversations' tools take is the best guess for a first call."""
    known = paces()
    assert known.gaps(b"new") is None
    known.ended(TAG, turn_id="t", mark=mark(story(QUESTION)), now=0)
    known.began(TAG, 7)
    gaps = known.gaps(b"new")
    assert gaps is not None
    assert gaps.mean_s == 7


@given(st.lists(st.floats(0, MAX_GAP_S), min_size=1, max_size=50))
def test_expected_pauses_stay_within_what_was_seen(pauses: list[float]) -> None:
    """The mean is between the shortest and the longest, the short end above 0."""
    gaps = Gaps(mean_s=pauses[0], deviation_s=0.0)
    for pause in pauses[1:]:
        gaps = gaps.after(pause)
    slack = 1e-6 * max(pauses)
    assert min(pauses) - slack <= gaps.mean_s <= max(pauses) + slack
    assert 0 <= gaps.short_s <= gaps.mean_s


def test_a_clock_that_is_put_back_leaves_no_negative_pause() -> None:
    """Pauses are never below nothing, nor above a day."""
    known = paces()
    for now in (-1e9, 1e9):
        known.ended(TAG, turn_id="t", mark=mark(story(QUESTION)), now=0)
        gap_s = known.began(TAG, now)
        assert gap_s is not None
        assert 0 <= gap_s <= MAX_GAP_S


def test_memory_is_bounded() -> None:
    """The least recently used conversation goes first."""
    known = paces(3)
    for i in range(10):
        known.prefilled(bytes([i]), num_bytes=10, num_tokens=5)
    assert len(known) == 3
    assert known.find(bytes([9])).bytes_per_token == 2
    assert known.find(bytes([0])).bytes_per_token is None
    known.forget(bytes([9]))
    assert len(known) == 2


def test_the_next_turn_is_expected_to_bring_as_much_as_the_last() -> None:
    """Before a conversation went on, as much as others did; before any, a guess."""
    paces = Paces(max_conversations=5)
    assert paces.expected_new(b"a") == UNKNOWN_NEW_TOKENS
    paces.grew(b"a", {"turn 1": 700, "turn 2": 90})
    paces.grew(b"a", {})
    assert paces.expected_new(b"a") == paces.expected_new(b"b") == 90
    paces.grew(b"b", {"turn 1": 400})
    assert paces.expected_new(b"a") == 90


def test_many_conversations_give_the_garbage_collector_next_to_nothing_to_look_at() -> (
    None
):
    """Else each of its looks would stop every stream for the longer, the more
    conversations there are."""
    count, known = 2000, Paces(max_conversations=10_000)
    told = mark(story(SYSTEM, QUESTION))
    gc.collect()
    before = len(gc.get_objects())
    for number in range(count):
        tag = number.to_bytes(8, "little")
        known.ended(tag, turn_id=f"{number}-1", mark=told, now=1.0)
        known.began(tag, 2.0)
        known.ended(tag, turn_id=f"{number}-2", mark=told, now=3.0)
    for _ in range(2):  # each look lets go of one more level of tuples
        gc.collect()
    assert len(gc.get_objects()) - before < count / 100
