"""The SDK's pure parts: conversations, turns, reports, and what importing costs."""

import contextvars
import json
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvloom
from kvloom import MemoryStore, TurnReport
from kvloom._carry import Carrier, Ticket
from kvloom._conversation import Conversation, conversation, current
from kvloom._outgoing import Outgoing
from kvloom._thread import conversation_in, lane_of
from kvloom._tool_times import answered_calls, offered_tools
from kvloom._turn import Turn
from kvloom.protocol import (
    CONVERSATION_HEADER,
    KV_TRANSFER_PARAMS,
    PlanKind,
    PlanReport,
    Reason,
    carry,
    conversation_id,
    is_conversation_id,
)

HANDLE = "kvl1." + "h" * 20
UUID = "1f0c3d5e-77aa-6b2c-8001-0123456789ab"


# --- conversations


def test_a_conversation_ends_with_its_block() -> None:
    """Conversations nest, and after the block there is none."""
    assert current() is None
    with conversation("outer"):
        with conversation("inner", lane="l") as inner:
            assert current() == inner == Conversation(thread="inner", lane="l")
        assert current() == Conversation(thread="outer")
    assert current() is None


def test_a_conversation_ends_when_its_block_fails() -> None:
    """An exception leaves no conversation behind."""
    with pytest.raises(KeyError), conversation("t"):
        raise KeyError
    assert current() is None


def test_a_conversation_stays_in_its_context() -> None:
    """What one request's context says is unknown to any other."""
    other = contextvars.copy_context()
    with conversation("t"):
        assert other.run(current) is None
        assert contextvars.copy_context().run(current) is not None


@settings(deadline=None)  # a busy machine is no failure
@given(st.text(min_size=1), st.text(), st.text())
def test_only_a_hash_of_a_thread_is_sent(thread: str, lane: str, space: str) -> None:
    """An ID is fit to be sent whatever the thread is called."""
    named = Conversation(thread=thread, lane=lane)

    sent = named.id(default_namespace=space)

    assert sent == conversation_id(namespace=space, thread=thread, lane=lane)
    assert is_conversation_id(sent)


def test_a_raw_thread_id_never_shows() -> None:
    """Logging a conversation does not log the thread's id."""
    assert "alice@example.com" not in repr(Conversation(thread="alice@example.com"))


def test_a_conversation_needs_a_name() -> None:
    """An empty thread would mix up everybody's histories."""
    with pytest.raises(ValueError, match="needs a name"), conversation(""):
        pass


# --- lanes


@pytest.mark.parametrize(
    ("checkpoint_ns", "lane"),
    [
        ("", ""),
        (f"model:{UUID}", "model"),
        (f"math:{UUID}|model:{UUID}", "math|model"),
        (f"math|model:{UUID}", "math|model"),
        (f"math:{UUID}|1|model:{UUID}", "math|model"),
        (f"Middleware.before_model:{UUID}", "Middleware.before_model"),
    ],
)
def test_a_lane_is_the_place_in_the_graph(checkpoint_ns: str, lane: str) -> None:
    """What changes with every step is no part of a lane."""
    assert lane_of(checkpoint_ns) == lane


def test_a_config_without_a_thread_names_no_conversation() -> None:
    """Nothing is made up where a thread is missing."""
    for config in (None, {}, {"configurable": {}}, {"configurable": {"thread_id": ""}}):
        assert conversation_in(config) is None
    named = conversation_in({"configurable": {"thread_id": 7}})
    assert named == Conversation(thread="7")


# --- turns


def _turn(*, num_choices: int = 1, is_streamed: bool = True) -> Turn:
    return Turn(num_choices=num_choices, is_streamed=is_streamed, started_at=1.0)


def _chunk(reason: str | None = None, *, index: int = 0) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": {}, "finish_reason": reason}]}


HELD = {"choices": [], KV_TRANSFER_PARAMS: carry(HANDLE)}


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.sampled_from([None, "stop", "error", "held"]), max_size=8))
def test_a_handle_is_kept_only_after_a_clean_end(steps: list[str | None]) -> None:
    """Whatever a stream brings, its handle counts only with a clean end."""
    turn = _turn()
    taken = []
    for step in steps:
        turn.see(HELD if step == "held" else _chunk(step), now=2.0)
        if handle := turn.take_handle():
            taken.append(handle)

    first_error = steps.index("error") if "error" in steps else len(steps)
    clean = steps[:first_error]
    assert bool(taken) == ("stop" in clean and "held" in clean)


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.sampled_from(["stop", "held", "done", "text", "junk"]), max_size=8))
def test_only_done_ends_a_stream_of_chunks(steps: list[str]) -> None:
    """A stream that stops before ``[DONE]`` leaves no handle, whatever it said."""
    events = {
        "stop": json.dumps(_chunk("stop")).encode(),
        "held": json.dumps(HELD).encode(),
        "done": b"[DONE]",
        "text": json.dumps({"choices": [{"delta": {"content": "x"}}]}).encode(),
        "junk": b'{"choices": [{"delta',
    }
    turn = Turn(num_choices=1, is_streamed=True, started_at=1.0, needs_done=True)
    for step in steps:
        turn.see_payload(events[step], now=2.0)

    assert bool(turn.take_handle()) == ({"stop", "held", "done"} <= set(steps))
    assert turn.text == "x" * steps.count("text")


def test_all_choices_must_finish() -> None:
    """With ``n=2`` the first choice's end is not the answer's."""
    turn = _turn(num_choices=2)
    turn.see(HELD | _chunk("stop"), now=2.0)
    assert turn.take_handle() is None

    turn.see(_chunk("stop", index=1), now=2.0)
    assert turn.take_handle() == HANDLE
    assert turn.take_handle() is None


def test_a_report_is_due_once() -> None:
    """Chunks after the end do not report again."""
    turn = _turn()
    due = []
    for chunk in (_chunk(), _chunk("stop"), HELD):
        turn.see(chunk, now=2.5)
        due.append(turn.take_report())

    assert due == [False, True, False]
    assert turn.ttft_s == 1.5


def test_a_failed_response_leaves_nothing() -> None:
    """The Responses API's failed event is no clean end."""
    turn = _turn()
    failed = {"object": "response", "status": "failed", **HELD}
    turn.see({"type": "response.failed", "response": failed}, now=2.0)

    assert not turn.has_ended


def test_a_foreign_servers_params_are_no_handle() -> None:
    """What a stock engine returns is never stored or sent back."""
    turn = _turn(is_streamed=False)
    raw = {"do_remote_prefill": True, "remote_block_ids": [1]}
    turn.see(_chunk("stop") | {KV_TRANSFER_PARAMS: raw}, now=2.0)

    assert turn.take_handle() is None


nonsense: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 1.5, "", "stop", "function_call", [], {}, ["x"], {"id": "x"}]
)


def _anything_in(*keys: str, **known: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """An object of the protocol with nonsense in some places, or nonsense itself."""
    values = {key: nonsense | known.get(key, nonsense) for key in (*keys, *known)}
    return nonsense | st.fixed_dictionaries({}, optional=values)


calls = st.lists(_anything_in("id", "type", function=_anything_in("name")), max_size=2)
said = _anything_in("role", "content", "reasoning", tool_calls=calls)
choices = st.lists(
    _anything_in("index", "finish_reason", "text", delta=said, message=said), max_size=2
)
output = st.lists(_anything_in("type", "call_id", "name"), max_size=2)
answers = st.fixed_dictionaries(
    {"object": st.just("response") | nonsense},
    optional={
        "type": st.just("x.delta") | nonsense,
        "status": nonsense,
        "choices": choices,
        "output": output,
        "response": nonsense,
        "delta": nonsense,
        "error": nonsense,
        KV_TRANSFER_PARAMS: nonsense | st.just(carry(HANDLE)),
        "tool_choice": nonsense,
        "tools": calls | nonsense,
        "messages": st.lists(_anything_in("role", "tool_call_id"), max_size=2),
    },
)


@given(answers, st.booleans())
def test_no_answer_breaks_the_reader(answer: dict[str, Any], is_streamed: bool) -> None:
    """A foreign server may put anything anywhere: the caller's parser judges it."""
    turn = _turn(is_streamed=is_streamed)
    turn.see(answer, now=2.0)

    assert turn.take_handle() in {None, HANDLE}
    assert answered_calls(answer) is not None
    assert offered_tools(answer) is not None


@pytest.mark.parametrize(
    ("chunk", "has_begun"),
    [
        ({"choices": [{"index": 0, "delta": {"role": "assistant"}}]}, False),
        ({"choices": [{"index": 0, "delta": {"content": ""}}]}, False),
        (_chunk("stop"), False),
        (HELD, False),
        ({"choices": [{"index": 0, "delta": {"content": "x"}}]}, True),
        ({"choices": [{"index": 1, "delta": {"content": "x"}}]}, True),
        ({"choices": [{"index": 0, "delta": {"reasoning": "x"}}]}, True),
        ({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0}]}}]}, True),
        ({"choices": [{"index": 0, "text": "x"}]}, True),
        ({"type": "response.created", "response": {}}, False),
        ({"type": "response.reasoning_text.delta", "delta": "x"}, True),
        ({"type": "response.function_call_arguments.delta", "delta": "{"}, True),
    ],
)
def test_a_stream_has_begun_with_its_first_piece_of_anything(
    chunk: dict[str, Any], has_begun: bool
) -> None:
    """Text, reasoning or a tool call: somebody may have been shown it."""
    turn = _turn()
    turn.see(chunk, now=2.0)

    assert turn.has_begun is has_begun


# --- reports


PLAN = PlanReport(plan=PlanKind.COLD, reason=Reason.FIRST_TURN, prompt_tokens=5)


@pytest.mark.parametrize("plan", [None, PLAN])
@pytest.mark.parametrize("ttft_s", [None, 0.5])
def test_a_report_survives_being_stored(
    plan: PlanReport | None, ttft_s: float | None
) -> None:
    """Through JSON and back it says the same."""
    told = TurnReport(plan=plan, ttft_s=ttft_s)

    assert TurnReport.of_json(json.loads(json.dumps(told.as_json()))) == told


@pytest.mark.parametrize(
    ("counts", "ttft_s", "line"),
    [
        (
            {"prompt_tokens": 433, "local_tokens": 416, "computed_tokens": 17},
            None,
            "direct (short): 416 of 433 prompt tokens reused",
        ),
        (
            {"prompt_tokens": 50, "returned_tokens": 30, "computed_tokens": 10},
            0.5174,
            "direct (short): 40 of 50 prompt tokens reused, 30 of them returned from "
            "decode; first token after 0.52 s",
        ),
        ({}, 0.1, "direct (short): prompt tokens unknown; first token after 0.10 s"),
    ],
)
def test_a_printed_report_reads_like_a_sentence(
    counts: dict[str, int], ttft_s: float | None, line: str
) -> None:
    """``print(report(answer))`` is what the documents tell people to do."""
    plan = PlanReport(plan=PlanKind.DIRECT, reason=Reason.SHORT, **counts)

    assert str(TurnReport(plan=plan, ttft_s=ttft_s)) == line


def test_a_printed_report_says_that_no_router_of_ours_answered() -> None:
    """There is the time then, at least."""
    told = str(TurnReport(plan=None, ttft_s=None))
    assert told == "no plan of a kvloom router"


@pytest.mark.parametrize("value", [None, 1, {}, {"ttft_s": 1, "plan": "no"}])
def test_what_is_no_report_is_none(value: object) -> None:
    """Somebody else's field of the same name is not taken for a report."""
    assert TurnReport.of_json(value) is None


# --- the carrier


@dataclass
class Talk:
    """One conversation's memory of what it was given, for the property below."""

    name: str
    messages: list[dict[str, str]] = field(default_factory=list)
    handles: set[str] = field(default_factory=set)


def _outgoing(talk: Talk, *, attempt: int = 0) -> Outgoing:
    return Outgoing(
        endpoint="http://fake/v1",
        path="/chat/completions",
        headers={CONVERSATION_HEADER: talk.name},
        default_headers={},
        body={"model": "m", "messages": list(talk.messages)},
        attempt=attempt,
    )


@settings(deadline=None)  # a busy machine is no failure
@given(
    st.integers(1, 1000),
    st.lists(
        st.tuples(
            st.integers(0, 999),
            st.sampled_from(["ask", "ask", "end", "end", "leave", "retry"]),
        ),
        max_size=200,
    ),
)
def test_no_interleaving_lets_a_handle_cross_over(
    num_talks: int, steps: list[tuple[int, str]]
) -> None:
    """Of up to a thousand conversations, whoever asks, leaves, retries and finishes
    when: every handle stays at home and is sent once."""
    store = MemoryStore()
    carrier = Carrier(store=store, clock=lambda: 1.0)
    talks = [Talk(name=f"conversation-{n}") for n in range(num_talks)]
    waiting: list[tuple[Talk, Ticket]] = []
    sent: set[str] = set()
    for number, (who, what) in enumerate(steps):
        if what in ("end", "leave"):
            if not waiting:
                continue
            talk, ticket = waiting.pop(who % len(waiting))
            if what == "end":
                handle = f"kvl1.{number:016d}"
                talk.handles.add(handle)
                answer = {**_chunk("stop"), KV_TRANSFER_PARAMS: carry(handle)}
                carrier.capture(ticket, answer, plan=None)
        else:
            talk = talks[who % num_talks]
            talk.messages.append({"role": "user", "content": "the same"})
            added = carrier.attach(_outgoing(talk, attempt=what == "retry"))
            waiting.append((talk, added.ticket))
            params = added.body.get(KV_TRANSFER_PARAMS)
            if isinstance(params, dict):
                assert what != "retry"
                assert params["kvloom"] in talk.handles - sent
                sent.add(params["kvloom"])
        store.check_integrity()


# --- the surface


def test_the_public_surface_is_what_it_says() -> None:
    """Every name in ``__all__`` is there, and nothing else is offered."""
    assert all(getattr(kvloom, name) for name in kvloom.__all__)
    assert set(dir(kvloom)) == {*kvloom.__all__, "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = kvloom.nonsense


INTEGRATIONS = [
    "openai",
    "langchain",
    "langgraph",
    "httpx",
    "httpx2",
    "telemetry",
    "otel",
]


@pytest.mark.parametrize("module", INTEGRATIONS)
def test_integrations_offer_what_they_say(module: str) -> None:
    """What an integration defines for the public is its ``__all__``, and all of
    that can be imported."""
    loaded = import_module(f"kvloom.{module}")

    assert all(getattr(loaded, name) for name in loaded.__all__)
    assert sorted(set(loaded.__all__), key=str.lower) == sorted(
        loaded.__all__, key=str.lower
    )
    defined = {
        name
        for name, value in vars(loaded).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "") == loaded.__name__
    }
    assert defined <= set(loaded.__all__)


THIRD_PARTIES = (
    "openai httpx httpx2 langgraph langchain langchain_core pydantic tenacity msgspec "
    "zmq starlette torch vllm"
)


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import kvloom", ""),
        ("import kvloom.protocol", ""),
        ("import kvloom; kvloom.conversation; kvloom.MemoryStore", ""),
        ("import kvloom; kvloom.SQLiteStore; import kvloom.telemetry", ""),
        ("import kvloom.httpx", "httpx"),
        ("import kvloom.langgraph", ""),
        ("import kvloom.openai", "openai httpx httpx2 pydantic tenacity"),
        (
            "import kvloom.langchain",
            "openai httpx httpx2 pydantic langchain_core tenacity",
        ),
    ],
)
def test_importing_loads_no_more_than_it_must(statement: str, allowed: str) -> None:
    """I pay for an integration only when I import it."""
    listing = (
        f"import sys; print(*[m for m in {THIRD_PARTIES.split()} if m in sys.modules])"
    )

    result = subprocess.run(
        [sys.executable, "-c", f"{statement}; {listing}"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert set(result.stdout.split()) <= set(allowed.split())
