"""`kvloom bench reuse`: the conversations, what is heard, and what it comes to."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.protocol import PlanKind, PlanReport, Reason
from kvloom_server.bench.counters import Counters, counters_of
from kvloom_server.bench.dialogues import TOOLS, dialogue
from kvloom_server.bench.heard import Heard, common_prefix_len
from kvloom_server.bench.results import Row
from kvloom_server.bench.reuse import CACHES, ROUTERS, VARIANTS, effort
from kvloom_server.bench.reuse_aims import aim_rows
from kvloom_server.bench.reuse_rows import (
    STOCK_ENGINES,
    Place,
    Variant,
    cells,
    error_row,
    sources,
    summary_rows,
    turn_row,
)
from kvloom_server.bench.ways import Asked, Done

IDS = st.lists(st.integers(0, 3), max_size=12)
SEEDS = st.integers(0, 100)


@given(SEEDS, st.integers(0, 5), st.integers(50, 5000))
def test_a_conversation_follows_from_its_seed(
    seed: int, repeat: int, length: int
) -> None:
    """The same seed says the same, another repeat something else."""
    made = dialogue(seed=seed, repeat=repeat, prefix_tokens=length, num_turns=4)
    again = dialogue(seed=seed, repeat=repeat, prefix_tokens=length, num_turns=4)
    other = dialogue(seed=seed, repeat=repeat + 1, prefix_tokens=length, num_turns=4)
    assert made == again
    assert made.results != other.results
    assert made.num_turns == 4


@given(SEEDS, st.integers(2, 6))
def test_each_history_begins_with_the_one_before(seed: int, num_turns: int) -> None:
    """The model's own answer follows, then the tool's result that belongs to it."""
    talk = dialogue(seed=seed, repeat=0, prefix_tokens=200, num_turns=num_turns)
    answer = {"role": "assistant", "content": None, "tool_calls": [{"id": "call-1"}]}
    messages = list(talk.opening)
    histories = [messages]
    for turn in range(1, num_turns):
        messages = talk.next_messages(messages, answer, turn)
        histories.append(messages)
    for before, after in pairwise(histories):
        assert after[: len(before)] == before
        said, result = after[len(before) :]
        assert said == answer
        assert (result["role"], result["tool_call_id"]) == ("tool", "call-1")
    choices = [talk.prompt(turn)["tool_choice"] for turn in range(num_turns)]
    assert choices == ["required"] * (num_turns - 1) + ["none"]
    assert all(talk.prompt(turn)["tools"] == TOOLS for turn in range(num_turns))


def test_an_answer_that_was_cut_off_is_followed_by_words() -> None:
    """There is no call to answer, and the conversation goes on all the same."""
    talk = dialogue(seed=0, repeat=0, prefix_tokens=100, num_turns=2)
    cut_off = {"role": "assistant", "content": '{"name"'}
    *_, last = talk.next_messages(talk.opening, cut_off, 1)
    assert last == {"role": "user", "content": talk.results[0]}


def chunk(**delta: Any) -> dict[str, Any]:
    token_ids = delta.pop("token_ids", None)
    finish = delta.pop("finish_reason", None)
    choice = {"delta": delta, "token_ids": token_ids, "finish_reason": finish}
    return {"choices": [choice]}


def piece(**function: str) -> dict[str, Any]:
    return {"index": 0, "function": function}


def test_a_streamed_call_is_put_together() -> None:
    """Name and arguments come in pieces; the first chunk's time is the TTFT."""
    heard = Heard(began=10.0)
    first = chunk(role="assistant", token_ids=[7]) | {"prompt_token_ids": [1, 2, 3]}
    heard.take(first, 10.5)
    begun = {"id": "call-1", "type": "function", **piece(name="look_up", arguments="")}
    heard.take(chunk(tool_calls=[begun], token_ids=[8]), 11.0)
    heard.take(chunk(tool_calls=[piece(arguments='{"thing": ')]), 12.0)
    last = chunk(tool_calls=[piece(arguments='"lamp"}')], token_ids=[9])
    last["choices"][0]["finish_reason"] = "tool_calls"
    heard.take(last, 13.0)
    usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    heard.take({"choices": [], "usage": usage}, 14.0)
    assert heard.ttft_s == 0.5
    assert heard.message["tool_calls"] == [
        {
            "id": "call-1",
            "type": "function",
            "function": {"name": "look_up", "arguments": '{"thing": "lamp"}'},
        }
    ]
    assert (heard.prompt_ids, heard.token_ids) == ([1, 2, 3], [7, 8, 9])
    assert (heard.finish_reason, heard.cached_tokens) == ("tool_calls", 2)


@given(IDS, IDS)
def test_the_common_prefix_is_common_and_the_longest(
    a: list[int], b: list[int]
) -> None:
    """Equal up to it, and different or over right after."""
    found = common_prefix_len(a, b)
    assert a[:found] == b[:found]
    assert a[: found + 1] != b[: found + 1] or found == len(a) == len(b)


def answer(ms: float, prompt: list[int], said: list[int], cached: int) -> Heard:
    return Heard(
        began=0.0,
        first_at=ms / 1e3,
        prompt_ids=prompt,
        token_ids=said,
        cached_tokens=cached,
    )


def place(variant: Variant, turn: int, *, cache: Any = "lost") -> Place:
    return Place(
        variant=variant,
        prefill_cache=cache,
        conversation="100-0",
        prefix_tokens=100,
        turn=turn,
    )


def report(plan: PlanKind, **counts: int) -> PlanReport:
    return PlanReport(plan=plan, reason=Reason.LEASE_HELD, **counts)


def test_tokens_are_counted_where_the_prompt_was_computed() -> None:
    """By prefill's word where it took part, else by that of the engine that
    answered; decode's cache is no reuse of a turn that prefill computed."""
    heard = answer(1.0, [1] * 10, [2], 8)
    cold = report(PlanKind.COLD, local_tokens=0, returned_tokens=0, computed_tokens=10)
    assert sources(Asked(heard=heard, plan=cold), Variant.OFF).computed == 10
    for alone in (None, report(PlanKind.DIRECT)):
        found = sources(Asked(heard=heard, plan=alone), Variant.DIRECT)
        assert (found.local, found.returned, found.computed) == (8, 0, 2)


@pytest.mark.parametrize("variant", sorted(STOCK_ENGINES))
def test_tokens_of_others_routers_are_counted_at_prefill(variant: Variant) -> None:
    """They name no plan; decode's usage says what it read from prefill."""
    heard = answer(1.0, [1] * 10, [2], 9)
    prefill = Counters(local_tokens=4.0, returned_tokens=3.0)
    found = sources(Asked(heard=heard, done=Done(prefill=prefill)), variant)
    assert (found.local, found.returned, found.computed) == (4, 3, 3)


METRICS = """# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 64.0
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 32.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 16.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 2.5e+06
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="m"} 0.25
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
vllm:kvloom_lease_events_total{engine="0",reason="room",state="evicted"} 3.0
vllm:kvloom_lease_events_total{engine="0",reason="",state="granted"} 40.0
python_info{version="3.11"} 1.0
"""


def test_an_engine_tells_what_it_did_for_a_turn() -> None:
    """All ranks together; what was there before is not the turn's."""
    found = counters_of(METRICS)
    assert found == Counters(
        local_tokens=96.0,
        returned_tokens=16.0,
        moved_bytes=2.5e6,
        moved_s=0.25,
        preemptions=2.0,
        evictions=3.0,
    )
    before = Counters(local_tokens=96.0, returned_tokens=6.0)
    assert found.since(before).local_tokens == 0.0
    assert found.since(before).returned_tokens == 10.0
    assert counters_of("") == Counters()


def moved(heard: Heard) -> Asked:
    """KV went both ways for it."""
    prefill = Counters(moved_bytes=3000.0, moved_s=0.002)
    decode = Counters(moved_bytes=1000.0, moved_s=0.001)
    return Asked(heard=heard, done=Done(prefill=prefill, decode=decode))


def rows_of(variant: Variant, ms: float, *, cache: str = "lost") -> list[Row]:
    """A conversation of two turns; the second has the first's history."""
    first = answer(500.0, [1, 2, 3], [4], 0)
    second = answer(ms, [1, 2, 3, 4, 5], [6], 4)
    at = [place(variant, turn, cache=cache) for turn in (1, 2)]
    return [
        turn_row(at[0], Asked(heard=first), history=[], truth=[4]),
        turn_row(at[1], moved(second), history=[1, 2, 3, 4], truth=[6]),
    ]


def test_a_row_has_what_the_turn_was() -> None:
    """Every figure that the benchmark promises."""
    _, row = rows_of(Variant.LAZY, 20.0)
    assert row["history_tokens"] == row["common_tokens"] == 4
    assert row["ttft_ms"] == pytest.approx(20.0)
    assert row["prompt_tokens"] == 5
    assert (row["local_tokens"], row["computed_tokens"]) == (4, 1)
    assert (row["moved_bytes"], row["moved_ms"]) == (4000, pytest.approx(3.0))
    assert row["wrong"] is False


def test_variants_are_compared_within_their_case() -> None:
    """With *off* of the same case, and with one vLLM, which lost nothing; first
    turns, which nobody can reuse anything in, do not count."""
    rows = rows_of(Variant.SINGLE, 10.0, cache="kept")
    rows += rows_of(Variant.OFF, 30.0, cache="kept") + rows_of(Variant.OFF, 80.0)
    rows += rows_of(Variant.LAZY, 20.0)
    found = {(r["prefill_cache"], r["variant"]): r for r in summary_rows(rows)}
    lazy = found["lost", "lazy"]
    assert (lazy["times_off"], lazy["times_single"]) == ("4.00", "2.00")
    assert (lazy["ttft"], lazy["reuse"]) == ("20", "100 %")
    assert found["kept", "off"]["times_single"] == "3.00"


def test_aims_say_whether_they_are_met() -> None:
    """Against one vLLM that lost nothing, stock returns, and no returns at all."""
    rows = rows_of(Variant.SINGLE, 100.0, cache="kept")
    rows += rows_of(Variant.OFF, 300.0) + rows_of(Variant.STOCK, 120.0)
    rows += rows_of(Variant.AUTO, 114.0)
    met = {row["aim"]: (row["bound_ms"], row["is_met"]) for row in aim_rows(rows)}
    assert met == {
        "within 10% and 5 ms of single": (pytest.approx(115.0), True),
        "no later than stock": (pytest.approx(120.0), True),
    }
    long = [row | {"prefix_tokens": 4000} for row in rows]
    (gain,) = (row for row in aim_rows(long) if "off" in row["aim"])
    assert (gain["bound_ms"], gain["is_met"]) == (pytest.approx(300 / 3.3), False)


def test_no_aim_is_met_with_a_turn_that_failed() -> None:
    """However quick the others were."""
    rows = rows_of(Variant.STOCK, 120.0) + rows_of(Variant.AUTO, 20.0)
    failed = error_row(place(Variant.AUTO, 3), "status 500: no")
    assert [row["is_met"] for row in aim_rows(rows)] == [True]
    assert [row["is_met"] for row in aim_rows([*rows, failed])] == [False]


def test_aims_need_both_sides() -> None:
    """Nothing is said of what was not played, or not answered."""
    assert aim_rows(rows_of(Variant.AUTO, 10.0)) == []
    failed = [error_row(place(Variant.AUTO, 1), "status 500: no")]
    assert aim_rows(failed + rows_of(Variant.STOCK, 10.0)) == []


def test_wrong_answers_and_errors_are_never_lost() -> None:
    """Also in first turns, and where nothing was answered at all."""
    wrong = answer(1.0, [1, 2], [3], 0)
    at = place(Variant.EAGER, 1)
    rows = [turn_row(at, Asked(heard=wrong), history=[], truth=[4])]
    rows += [error_row(place(Variant.AUTO, 1), "status 500: no")]
    eager, auto = cells(rows)
    assert (eager.wrong, eager.errors, eager.ttft) == (1, 0, None)
    assert (auto.wrong, auto.errors, auto.ttft) == (0, 1, None)
    assert [row["times_off"] for row in summary_rows(rows)] == [None, None]


@pytest.mark.parametrize("is_quick", [True, False])
def test_what_is_asked_for_is_measured(is_quick: bool) -> None:
    """All variants unless some are named; a step each."""
    whole = effort(is_quick=is_quick, repeats=None)
    assert set(whole.variants) == set(VARIANTS) == set(Variant) - {Variant.SINGLE}
    assert set(VARIANTS) == set(ROUTERS) | STOCK_ENGINES
    some = effort(is_quick=is_quick, repeats=2, variants=[Variant.LAZY, Variant.OFF])
    assert some.variants == (Variant.OFF, Variant.LAZY)
    played = 2 * len(some.lengths) * (1 + 2) * len(CACHES)
    assert some.num_steps == 1 + 2 + played
    assert not some.needs_stock
    alone = effort(is_quick=is_quick, repeats=1, variants=[Variant.SINGLE])
    assert alone.variants == ()
    assert alone.num_steps == 1 + 1 + len(alone.lengths) * len(CACHES)
    other = effort(is_quick=is_quick, repeats=1, variants=[Variant.RIVAL])
    assert other.needs_stock
    assert other.num_steps == 2 + 2 + len(other.lengths) * (1 + 1) * len(CACHES)
