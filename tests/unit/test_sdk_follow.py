"""Reading along: however bytes are cut, the same is seen and the same passes."""

import gzip
import json
import zlib
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom import MemoryStore
from kvloom._carry import Carrier, Ticket
from kvloom._follow import Follower, Lines
from kvloom._outgoing import Outgoing
from kvloom.protocol import CONVERSATION_HEADER, KV_TRANSFER_PARAMS, carry

HANDLE = "kvl1." + "h" * 20


def _event(data: Any) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def _chunk(text: str, reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return {"choices": [choice]}


GOOD = b"".join(
    [
        b": a comment\n\n",
        _event(_chunk("vi")),
        b"event: x\r\n" + _event(_chunk("ér\n")).replace(b"\n\n", b"\r\n\r\n"),
        _event(_chunk("", "stop") | {KV_TRANSFER_PARAMS: carry(HANDLE)}),
        b"data: [DONE]\n\n",
    ]
)
BAD = b"".join(
    [
        _event(_chunk("vi")),
        _event(_chunk('the word "error" is no error')),
        _event({"error": {"message": "died"}}),
        _event(_chunk("never")),
    ]
)


def _started(store: MemoryStore) -> tuple[Carrier, Ticket]:
    carrier = Carrier(store=store, clock=lambda: 1.0)
    body = {"model": "m", "messages": [], "stream": True}
    request = Outgoing(
        endpoint="e",
        path="/chat/completions",
        headers={CONVERSATION_HEADER: "kvl-talk"},
        default_headers={},
        body=body,
        attempt=0,
    )
    return carrier, carrier.attach(request).ticket


def _cut(content: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(content), *(place % len(content) for place in places)})
    return [content[a:b] for a, b in pairwise(edges)]


cuts = st.lists(st.integers(0, 2000), max_size=30)
ends = st.sampled_from([b"\n", b"\r\n", b"\r"])


@settings(deadline=None)  # a busy machine is no failure
@given(cuts, ends)
def test_lines_are_the_same_however_they_are_cut(places: list[int], end: bytes) -> None:
    """Each data line is seen once, whole, and its place is in its own piece;
    whichever of the three line ends a server has."""
    lines = Lines()
    seen = []
    content = GOOD.replace(b"\r\n", b"\n").replace(b"\n", end)
    for piece in _cut(content, places):
        for start, payload in lines.feed(piece):
            assert 0 <= start < len(piece)
            seen.append(payload)

    assert seen == [payload for _, payload in Lines().feed(GOOD)]
    assert seen[-1] == b"[DONE]"
    assert list(lines.end()) == []


def test_the_last_line_may_lack_its_end() -> None:
    """Then the end of the bytes is its end."""
    lines = Lines()

    assert [payload for _, payload in lines.feed(GOOD.rstrip())][-1] != b"[DONE]"
    assert list(lines.end()) == [b"[DONE]"]


class Piece(bytes):
    """A piece that may not be put together with others one by one."""

    def __add__(self, other: object) -> bytes:
        raise AssertionError("a long line is copied with each of its pieces")

    __radd__ = __add__


def test_a_long_line_is_put_together_once() -> None:
    """An event of many megabytes costs what its bytes cost, not their square."""
    lines = Lines()
    pieces = [Piece(piece) for piece in [b"data: ", *[b"x" * 100] * 50, b"\n"]]

    seen = [payload for piece in pieces for _, payload in lines.feed(piece)]

    assert seen == [b"x" * 5000]


@settings(deadline=None)  # a busy machine is no failure
@given(cuts, st.sampled_from(["", "gzip", "deflate"]))
def test_all_bytes_pass_at_once_and_the_handle_is_kept(
    places: list[int], encoding: str
) -> None:
    """Nothing is held back, compressed or not, and nothing is lost."""
    packed = {"": bytes, "gzip": gzip.compress, "deflate": zlib.compress}[encoding](
        GOOD
    )
    store = MemoryStore()
    carrier, ticket = _started(store)
    follower = Follower(
        carrier, ticket, is_events=True, is_parsed=False, encoding=encoding
    )

    for piece in _cut(packed, places):
        assert follower.feed(piece) == (piece, None)
    follower.end()
    follower.close()

    assert "1 handles" in repr(store)
    assert follower.turn.text == "viér\n"


@settings(deadline=None)  # a busy machine is no failure
@given(cuts)
def test_an_error_event_stops_the_bytes_before_it(places: list[int]) -> None:
    """All that stands before the error passes; of the error no whole line does."""
    store = MemoryStore()
    carrier, ticket = _started(store)
    follower = Follower(carrier, ticket, is_events=True, is_parsed=True)
    passed = b""
    for piece in _cut(BAD, places):
        through, error = follower.feed(piece)
        passed += through
        if error is not None:
            break

    assert error is not None
    assert error.body == {"message": "died"}
    before, _, rest = BAD.partition(b'data: {"error"')
    assert passed.startswith(before)
    assert (b'data: {"error"' + rest).startswith(passed[len(before) :])
    assert b"never" not in passed
    assert passed.count(b"\n") == before.count(b"\n")


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.binary(max_size=40), max_size=10), st.booleans(), st.booleans())
def test_no_bytes_break_the_reader(
    pieces: list[bytes], is_events: bool, is_parsed: bool
) -> None:
    """Whatever a server sends, it passes, and leaves no handle."""
    for encoding in ("", "gzip", "br"):
        store = MemoryStore()
        carrier, ticket = _started(store)
        follower = Follower(
            carrier,
            ticket,
            is_events=is_events,
            is_parsed=is_parsed,
            encoding=encoding,
        )
        for piece in pieces:
            assert follower.feed(piece) == (piece, None)
        follower.end()
        follower.close()
        assert "0 handles" in repr(store)


@pytest.mark.parametrize("size", [10, 33 * 2**20])
def test_a_whole_answer_is_kept_within_bounds(size: int) -> None:
    """An answer larger than 32 MiB costs its handle, not the memory."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"content": "x" * size}}
    whole = json.dumps(
        {"choices": [choice], KV_TRANSFER_PARAMS: carry(HANDLE)}
    ).encode()
    store = MemoryStore()
    carrier, _ = _started(store)
    request = Outgoing(
        endpoint="e",
        path="/chat/completions",
        headers={CONVERSATION_HEADER: "kvl-talk"},
        default_headers={},
        body={"model": "m", "messages": []},
        attempt=0,
    )
    ticket = carrier.attach(request).ticket
    follower = Follower(carrier, ticket, is_events=False, is_parsed=False)

    for start in range(0, len(whole), 2**20):
        follower.feed(whole[start : start + 2**20])
    follower.end()

    assert ("1 handles" in repr(store)) == (size == 10)
