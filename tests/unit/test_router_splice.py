"""The handle goes in; every other byte stays as it is."""

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvloom_server.router.endings import spliced
from kvloom_server.router.splice import MAX_EVENT_BYTES, TailSplicer

HANDLE = "kvl1." + "x" * 127

DELTA = {
    "id": "c",
    "choices": [{"index": 0, "delta": {"content": "é\n"}, "finish_reason": None}],
}
LAST = {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
USAGE = {"id": "c", "choices": [], "usage": {"prompt_tokens": 7, "ratio": 1.50}}


def sse(value: object, *, newline: str = "\n") -> bytes:
    return f"data: {json.dumps(value)}{newline}{newline}".encode()


def run(stream: bytes, cuts: list[int], handle: str | None) -> bytes:
    """The stream through a splicer, cut at the given places."""
    splicer, out = TailSplicer(), b""
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    for start, end in pairwise(places):
        out += splicer.feed(stream[start:end])
        if splicer.is_done:
            out += splicer.finish(handle)
    return out + splicer.finish(None)


values: st.SearchStrategy[dict[str, object]] = st.dictionaries(
    st.sampled_from(["id", "delta", "usage", "finish_reason", "choices", "error"]),
    st.sampled_from([None, "stop", "[DONE]", [], "a\u2028b", {"x": 1.0}]),
    max_size=3,
)
newlines = st.sampled_from(["\n", "\r\n"])


@st.composite
def events(draw: st.DrawFn, newline: str) -> bytes:
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return f": ping{newline}{newline}".encode()
    value = draw(st.sampled_from([DELTA, LAST, USAGE]) | values)
    if kind == 1:
        lines = json.dumps(value, indent=1).split("\n")
        return (
            "".join(f"data: {line}{newline}" for line in lines).encode()
            + newline.encode()
        )
    head = f"event: x{newline}" if kind == 2 else ""
    return head.encode() + sse(value, newline=newline)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[bytes], bytes]:
    """Events, and what comes after them."""
    newline = draw(newlines)
    body = draw(st.lists(events(newline), max_size=6))
    tail = draw(st.sampled_from(["", "data: [DO", ": bye", "data: [DONE]"]))
    return body, (tail + 2 * newline if tail == "data: [DONE]" else tail).encode()


cut_places = st.lists(st.integers(0, 2000), max_size=12)


@given(streams(), cut_places)
def test_without_a_handle_the_bytes_are_those_that_came(
    stream: tuple[list[bytes], bytes], cuts: list[int]
) -> None:
    """A stream passes the router untouched, however the network cuts it."""
    whole = b"".join(stream[0]) + stream[1]
    assert run(whole, cuts, None) == whole


@given(streams(), cut_places, cut_places)
def test_with_a_handle_only_the_last_event_differs(
    stream: tuple[list[bytes], bytes], cuts: list[int], others: list[int]
) -> None:
    """The handle is added to at most one event, the same for any chunking."""
    body, tail = stream
    whole = b"".join(body) + tail
    out = run(whole, cuts, HANDLE)
    assert out == run(whole, others, HANDLE)
    if out == whole:
        return
    assert tail.startswith(b"data: [DONE]")
    data = [i for i, event in enumerate(body) if b"data:" in event]
    before, after = b"".join(body[: data[-1]]), b"".join(body[data[-1] + 1 :]) + tail
    assert out.startswith(before)
    assert out.endswith(after)
    changed = out[len(before) : len(out) - len(after)]
    expected = payload(body[data[-1]]) | {"kv_transfer_params": {"kvloom": HANDLE}}
    assert payload(changed) == expected


def payload(event: bytes) -> dict[str, object]:
    lines = event.replace(b"\r\n", b"\n").split(b"\n")
    value: dict[str, object] = json.loads(
        b"\n".join(line[5:] for line in lines if line.startswith(b"data:"))
    )
    return value


def test_vllms_stream_gets_the_handle_on_its_last_event() -> None:
    """A stock client finds the handle where a plain answer has it."""
    done = b"data: [DONE]\n\n"
    with_usage = sse(DELTA) + sse(LAST) + sse(USAGE) + done
    out = run(with_usage, [], HANDLE)
    assert out.startswith(sse(DELTA) + sse(LAST))
    assert b'"ratio": 1.5}' in out
    assert HANDLE.encode() in out.removeprefix(sse(DELTA) + sse(LAST))
    plain = run(sse(DELTA) + sse(LAST) + done, [], HANDLE)
    assert plain.startswith(sse(DELTA))
    assert plain.count(HANDLE.encode()) == 1


def test_an_event_that_is_not_the_last_is_not_held_back() -> None:
    """A token reaches the client with the bytes that bring it."""
    splicer = TailSplicer()
    assert splicer.feed(sse(DELTA)) == sse(DELTA)
    assert splicer.feed(sse(DELTA)[:9]) == b""
    assert splicer.feed(sse(DELTA)[9:] + sse(LAST)) == sse(DELTA)
    assert splicer.feed(sse(DELTA)) == sse(LAST) + sse(DELTA)


def test_continuous_usage_holds_nothing_back() -> None:
    """Asking for usage on every event does not delay any of them."""
    event = sse(DELTA | {"usage": {"prompt_tokens": 1}})
    assert TailSplicer().feed(event) == event


def test_the_engines_own_params_never_reach_the_client() -> None:
    """Hosts and ports of engines stay inside, with and without a handle."""
    inside = {"kv_transfer_params": {"remote_host": "10.0.0.1"}}
    for handle in (None, HANDLE):
        assert b"10.0.0.1" not in spliced(json.dumps(LAST | inside).encode(), handle)
        stream = sse(LAST | inside) + b"data: [DONE]\n\n"
        assert b"10.0.0.1" not in run(stream, [3, 50], handle)


def test_a_broken_stream_ends_between_events() -> None:
    """After a failure an error event can follow: no half event is before it."""
    splicer = TailSplicer()
    splicer.feed(sse(DELTA))
    splicer.feed(sse(LAST) + sse(DELTA)[:11])
    assert splicer.abandon() == sse(LAST)


def test_an_endless_event_does_not_fill_the_memory() -> None:
    """What is no event stream at all is passed on."""
    splicer = TailSplicer()
    data = b"x" * (MAX_EVENT_BYTES + 1)
    assert splicer.feed(data) == data
    assert splicer.feed(b"more") == b"more"
    assert splicer.finish(HANDLE) == b""


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), json_values, max_size=4), st.booleans())
def test_a_plain_answer_keeps_all_its_values(
    answer: dict[str, object], ascii_only: bool
) -> None:
    """A plain answer has the handle besides what the engine said."""
    raw = json.dumps(answer, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    assert spliced(raw, None) == raw
    changed = json.loads(spliced(raw, HANDLE))
    assert changed == answer | {"kv_transfer_params": {"kvloom": HANDLE}}


def test_a_plain_answer_that_is_no_object_stays_as_it_is() -> None:
    """The router never invents an answer."""
    for raw in (b"[1]", b"nonsense", b"", b'"text"'):
        assert spliced(raw, HANDLE) == raw
