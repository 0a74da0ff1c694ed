"""Recorded sessions as a benchmark's input: what is read, and how it is replayed."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvloom_server.bench.converters import CONVERTERS
from kvloom_server.bench.traces import (
    Session,
    TraceError,
    read_sessions,
    replayed,
    write_sessions,
)
from kvloom_server.cli import app

SYSTEM = {"role": "system", "content": "You book flights."}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {}}}


def user(text):
    return {"role": "user", "content": text}


def calls(*ids):
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": i, "type": "function", "function": {"name": "find"}} for i in ids
        ],
    }


def words(text):
    return {"role": "assistant", "content": text}


def result(call_id, text):
    return {"role": "tool", "tool_call_id": call_id, "name": "find", "content": text}


RECORD = Session(
    session="a1",
    messages=[
        SYSTEM,
        user("To Oslo."),
        calls("r1", "r2"),
        result("r1", "two"),
        result("r2", "three"),
        words("There are five."),
        user("Thanks."),
        words("Bye."),
    ],
    tools=[TOOL],
    gaps_s=[2.0, 8.0],
)


def test_a_session_has_a_turn_for_each_answer():
    """And nothing of the recorded answers."""
    talk = replayed(RECORD)
    assert talk.num_turns == 3
    assert list(talk.opening) == [SYSTEM, user("To Oslo.")]
    assert talk.prompt(0)["tool_choice"] == "required"
    assert [talk.prompt(n)["tool_choice"] for n in (1, 2)] == ["none", "none"]


def test_recorded_results_go_to_the_models_own_calls():
    """By place, as the ids are the model's; one call more than recorded gets an
    empty result, one less has the rest said by the user."""
    talk = replayed(RECORD)
    own = calls("m1", "m2")
    told = talk.next_messages(talk.opening, own, 1)
    assert told[2] is own
    assert told[3:] == [
        {"role": "tool", "tool_call_id": "m1", "content": "two"},
        {"role": "tool", "tool_call_id": "m2", "content": "three"},
    ]
    fewer = talk.next_messages(talk.opening, calls("m1"), 1)
    assert fewer[3]["tool_call_id"] == "m1"
    assert fewer[4] == user("three")
    more = talk.next_messages(talk.opening, calls("m1", "m2", "m3"), 1)
    assert more[5] == {"role": "tool", "tool_call_id": "m3", "content": ""}
    in_words = talk.next_messages(talk.opening, words("I don't know."), 1)
    assert in_words[3:] == [user("two"), user("three")]


def test_pauses_are_the_recorded_ones_scaled():
    """A pause that was not recorded is the given one."""
    talk = replayed(RECORD, gap_scale=0.5)
    assert [talk.pause_s(n) for n in range(3)] == [0.0, 1.0, 4.0]
    silent = Session(messages=RECORD.messages)
    assert replayed(silent, default_gap_s=1.5).pauses_s == (0.0, 1.5, 1.5)


roles = st.sampled_from(["user", "tool", "assistant"])
texts = st.text(max_size=12)
bodies = st.fixed_dictionaries({"role": roles, "content": texts})


@given(st.lists(bodies, max_size=12))
def test_every_turn_goes_on_from_the_one_before(tail):
    """Whatever was recorded: histories only grow, and answers are the model's."""
    talk = replayed(Session(messages=[SYSTEM, user("Hello"), *tail]))
    history = list(talk.opening)
    for turn in range(1, talk.num_turns):
        answer = words(f"own {turn}")
        longer = talk.next_messages(history, answer, turn)
        assert longer[: len(history) + 1] == [*history, answer]
        assert len(longer) > len(history) + 1
        history = longer
    said = [m["content"] for m in history if m["role"] == "assistant"]
    assert said == [f"own {n}" for n in range(1, talk.num_turns)]
    heard = sorted(m["content"] for m in tail if m["role"] != "assistant")
    others = (m["content"] for m in history[2:] if m["role"] != "assistant")
    assert sorted(others) == heard  # results before what else is said


@given(
    st.lists(st.lists(bodies, max_size=6), min_size=1, max_size=4), st.integers(1, 4)
)
def test_what_is_written_is_read_again(tmp_path_factory, tails, limit):
    """As much of it as is asked for."""
    sessions = [
        Session(session=f"s{n}", messages=[user("Hi"), *tail])
        for n, tail in enumerate(tails)
    ]
    file = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_sessions(file, sessions)
    assert read_sessions(file) == sessions
    assert read_sessions(file, limit=limit) == sessions[:limit]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 1"),
        ('{"messages": [{"content": "x"}]}', "no role"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "does not begin"),
        ('{"messages": []}', "does not begin"),
        ('{"messages": [{"role": "user"}], "gaps_s": [-1]}', "below 0"),
        ("", "no session"),
    ],
)
def test_what_is_no_trace_is_said(tmp_path, line, why):
    """With the line, so that it can be mended."""
    file = tmp_path / "trace.jsonl"
    file.write_text(line)
    with pytest.raises(TraceError, match=why):
        read_sessions(file)


def test_chat_logs_become_sessions():
    """OpenAI's form, one a line; an answer at the beginning is nobody's."""
    lines = [
        json.dumps({"id": "x", "messages": [words("?"), user("Hi"), words("Yes")]}),
        "",
        json.dumps({"messages": [user("Two")], "tools": [TOOL]}),
    ]
    one, two = CONVERTERS["openai"]("\n".join(lines).encode())
    assert (one.session, one.messages) == ("x", [user("Hi"), words("Yes")])
    assert (two.session, two.tools) == ("line-3", [TOOL])


def test_tau_benchs_runs_become_sessions():
    """Each run of a task is one."""
    runs = [
        {"task_id": 7, "trial": t, "reward": 0.0, "traj": RECORD.messages}
        for t in range(2)
    ]
    sessions = CONVERTERS["tau"](json.dumps(runs).encode())
    assert [s.session for s in sessions] == ["tau-7-0", "tau-7-1"]
    assert replayed(sessions[0]).num_turns == 3


def test_an_swe_agents_trajectory_becomes_a_session():
    """Texts in parts are joined; results name their calls."""
    history = [
        {"role": "system", "content": "Mend it.", "agent": "main"},
        {"role": "user", "content": [{"type": "text", "text": "The issue"}]},
        calls("c1") | {"thought": "hm", "content": ""},
        {
            "role": "tool",
            "content": [{"type": "text", "text": "files"}],
            "tool_call_ids": ["c1"],
        },
        words("Done."),
    ]
    data = json.dumps({"environment": "swe", "history": history}).encode()
    [session] = CONVERTERS["swe-agent"](data)
    assert session.messages[1] == user("The issue")
    assert session.messages[3]["tool_call_id"] == "c1"
    assert replayed(session).num_turns == 2


def test_mooncakes_requests_become_conversations():
    """One that begins with another's whole blocks is its next turn; a system prompt
    that all share makes no conversation."""
    requests = [
        {"timestamp": 0, "input_length": 1500, "hash_ids": [0, 1, 2]},
        {"timestamp": 1000, "input_length": 1500, "hash_ids": [0, 7, 8]},
        {"timestamp": 3000, "input_length": 2500, "hash_ids": [0, 1, 3, 4]},
    ]
    data = "\n".join(json.dumps(r) for r in requests).encode()
    grown, other = CONVERTERS["mooncake"](data)
    assert replayed(grown).num_turns == 2
    assert grown.gaps_s == [3.0]
    assert replayed(other).num_turns == 1
    shared = grown.messages[0]["content"][:200]
    assert other.messages[0]["content"].startswith(shared)


@pytest.mark.parametrize("kind", CONVERTERS)
@pytest.mark.parametrize("data", [b"{", b'{"messages": 3}', b"[]", b'[{"traj": 1}]'])
def test_what_can_not_be_converted_is_said(kind, data):
    """Never a stack of library errors; an empty list has no sessions."""
    with suppress(TraceError):
        assert CONVERTERS[kind](data) == []


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})


def test_a_recording_is_converted_on_the_command_line(tmp_path):
    """What comes out is what `bench reuse --trace` reads."""
    log, trace = tmp_path / "log.jsonl", tmp_path / "trace.jsonl"
    log.write_text(json.dumps({"messages": RECORD.messages}))
    done = run("bench", "convert", "openai", log, trace)
    assert done.exit_code == 0
    assert "1 sessions, 3 turns" in done.output
    assert replayed(read_sessions(trace)[0]).num_turns == 3


@pytest.mark.parametrize("text", ["", "{", '{"messages": []}'])
def test_a_recording_of_no_use_is_one_sentence(tmp_path, text):
    """On both ways in, before anything starts."""
    file = tmp_path / "log.jsonl"
    file.write_text(text)
    for done in (
        run("bench", "convert", "openai", file, tmp_path / "out"),
        run("bench", "reuse", "--trace", file),
    ):
        assert done.exit_code == 1
        assert done.output.startswith("error: ")
        assert "Traceback" not in done.output
