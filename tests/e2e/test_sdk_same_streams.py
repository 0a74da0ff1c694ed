"""Whatever a server streams, kvloom's clients tell what openai's own tell."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import openai
import pytest
from e2e.test_sdk_calls import HELLO, URL
from e2e.test_sdk_fake import http
from hypothesis import given
from hypothesis import strategies as st

from kvloom._report import REPORT_KEY
from kvloom.openai import AsyncOpenAI, OpenAI
from kvloom.protocol import KV_TRANSFER_PARAMS, carry


def _chunk(text: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    frame = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return {**frame, "choices": [choice], **more}


END = _chunk("", "stop", **{KV_TRANSFER_PARAMS: carry("kvl1." + "h" * 20)})

words = st.sampled_from(["a", "ü", "\U0001f600", '"error"', "\u2028"]).map(_chunk)
errors: st.SearchStrategy[Any] = st.sampled_from(
    [{"message": "died"}, {"message": 5}, {}, "died", [], None, 1]
)
odd_choices: st.SearchStrategy[Any] = st.sampled_from([[], None, [{}], [None], {}])
values = (
    words
    | st.just(END)
    | st.builds(lambda error: {"error": error}, errors)
    | st.builds(lambda error: _chunk("b", error=error), errors)
    | st.builds(lambda choices: {"choices": choices}, odd_choices)
)
events = values.map(lambda value: json.dumps(value, ensure_ascii=False)) | (
    st.sampled_from(["", "{", "null", "[]", '"x"', "[DONE]", " [DONE]", "[DONE]x"])
)
lines = events.map(lambda data: f"data: {data}\n\n") | st.sampled_from(
    [": comment\n\n", "\n", "event: x\n", "event: error\n", "id: 5\nretry: 1\n"]
)
ENDING = f"data: {json.dumps(END)}\n\ndata: [DONE]\n\n"


@dataclass(frozen=True)
class Stream:
    """What a server sends, and in which pieces."""

    said: list[str]
    is_ended: bool
    line_end: str
    cuts: list[int]
    is_lost: bool
    """Whether the connection fails after it."""

    def pieces(self) -> list[bytes]:
        text = "".join([*self.said, ENDING if self.is_ended else ""])
        content = text.replace("\n", self.line_end).encode()
        edges = {0, len(content), *(c % (len(content) + 1) for c in self.cuts)}
        return [content[a:b] for a, b in pairwise(sorted(edges))]


streams = st.builds(
    Stream,
    said=st.lists(lines, max_size=6),
    is_ended=st.booleans(),
    line_end=st.sampled_from(["\n", "\r\n", "\r"]),
    cuts=st.lists(st.integers(0, 2000), max_size=6),
    is_lost=st.booleans(),
)


def _serving(stream: Stream) -> Any:
    class Pieces(http.SyncByteStream, http.AsyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield from stream.pieces()
            if stream.is_lost:
                raise http.ReadError("the peer is gone")

        async def __aiter__(self) -> AsyncIterator[bytes]:
            for piece in self:
                yield piece

    headers = {"content-type": "text/event-stream"}
    return http.MockTransport(
        lambda _: http.Response(200, stream=Pieces(), headers=headers)
    )


ASK: Any = {"model": "m", "messages": HELLO, "stream": True}

Told = tuple[list[Any], Exception | None]


def _heard(client: openai.OpenAI) -> Told:
    heard: list[Any] = []
    try:
        for chunk in client.chat.completions.create(**ASK):
            heard.append(_plain(chunk))  # noqa: PERF401 - what came before the error
    except (openai.OpenAIError, ValueError) as error:
        return heard, error
    return heard, None


async def _heard_async(client: openai.AsyncOpenAI) -> Told:
    heard: list[Any] = []
    try:
        async for chunk in await client.chat.completions.create(**ASK):
            heard.append(_plain(chunk))  # noqa: PERF401 - what came before the error
    except (openai.OpenAIError, ValueError) as error:
        return heard, error
    return heard, None


def _plain(chunk: Any) -> Any:
    if not hasattr(chunk, "model_dump"):
        return chunk  # no object at all
    told = chunk.model_dump(warnings=False)
    told.pop(REPORT_KEY, None)
    return told


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@given(streams)
def test_a_stream_is_the_same_in_a_conversation(is_async: bool, stream: Stream) -> None:
    """The same chunks, and an error where openai has one, of a kind with it."""
    opened: Any = http.AsyncClient if is_async else http.Client
    kinds: Any = (
        (openai.AsyncOpenAI, AsyncOpenAI) if is_async else (openai.OpenAI, OpenAI)
    )
    stock, ours = (
        make(
            base_url=URL,
            api_key="k",
            http_client=opened(transport=_serving(stream)),
            max_retries=0,
        )
        for make in kinds
    )

    with ours.conversation("t"):
        told = [
            asyncio.run(_heard_async(client)) if is_async else _heard(client)
            for client in (stock, ours)
        ]

    (expected, error), (heard, our_error) = told
    assert heard == expected
    assert isinstance(our_error, type(error))
