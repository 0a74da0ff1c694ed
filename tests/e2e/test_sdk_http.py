"""kvloom's HTTP clients, for frameworks that take nothing but an ``http_client``."""

import asyncio
import gzip
import json
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest
from e2e.test_sdk_calls import HELLO, ID, NEXT, URL
from e2e.test_sdk_fake import IS_OPENAI_3, FakeRouter, http

import kvloom
import kvloom.httpx
from kvloom.openai import OpenAI
from kvloom.telemetry import Ending, Event, TurnEnded, TurnFailed

if IS_OPENAI_3:
    import httpx2

    import kvloom.httpx2

LIBRARIES = [httpx, httpx2] if IS_OPENAI_3 else [httpx]
OURS: dict[str, Any] = {"httpx": kvloom.httpx}
if IS_OPENAI_3:
    OURS["httpx2"] = kvloom.httpx2

every_library = pytest.mark.parametrize("library", LIBRARIES, ids=lambda m: m.__name__)
every_stream = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def _body(messages: list[Any], *, stream: bool = False) -> dict[str, Any]:
    return {"model": "m", "messages": messages} | ({"stream": True} if stream else {})


def _client(router: FakeRouter, library: ModuleType, **options: Any) -> Any:
    router.library = library
    transport = library.MockTransport(router)
    return OURS[library.__name__].Client(transport=transport, **options)


@every_library
@every_stream
def test_an_answer_tells_how_long_it_took(library: ModuleType, stream: bool) -> None:
    """And all else that the library's own answers tell."""
    with _client(FakeRouter(), library) as client, kvloom.conversation("t"):
        answer = client.post(
            f"{URL}/chat/completions", json=_body(HELLO, stream=stream)
        )

    assert answer.elapsed.total_seconds() > 0
    assert answer.is_closed


def _answering(library: ModuleType, status: int, closed: list[bool]) -> Any:
    """A transport whose answers say when they are closed."""

    class Answer(library.SyncByteStream, library.AsyncByteStream):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Any:
            yield b"{}"

        async def __aiter__(self) -> Any:
            yield b"{}"

        def close(self) -> None:
            closed.append(True)

        async def aclose(self) -> None:
            closed.append(True)

    return library.MockTransport(lambda _: library.Response(status, stream=Answer()))


def _raise_at_the_end(event: Event) -> None:
    if isinstance(event, TurnEnded | TurnFailed):
        raise ZeroDivisionError


@every_library
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("status", [200, 500])
def test_a_listener_that_raises_leaves_no_connection_open(
    library: ModuleType, is_async: bool, status: int
) -> None:
    """What it raises reaches me, as the document says; the answer is closed."""
    closed: list[bool] = []
    ours = OURS[library.__name__]
    make = ours.AsyncClient if is_async else ours.Client
    transport = _answering(library, status, closed)
    client = make(transport=transport, kvloom_events=_raise_at_the_end)

    async def ask() -> None:
        answer = client.post(f"{URL}/chat/completions", json=_body(HELLO))
        await answer if is_async else answer

    with kvloom.conversation("t"), pytest.raises(ZeroDivisionError):
        asyncio.run(ask())

    assert closed


@every_library
@every_stream
def test_a_plain_http_client_carries_the_conversation(
    library: ModuleType, stream: bool
) -> None:
    """A framework that posts JSON by itself takes turns like any other."""
    router = FakeRouter()
    with _client(router, library) as client, kvloom.conversation("t"):
        for messages in (HELLO, NEXT):
            answer = client.post(
                f"{URL}/chat/completions", json=_body(messages, stream=stream)
            )
            assert "four" in answer.text or "fou" in answer.text

    assert [seen.conversation for seen in router.seen] == [ID, ID]
    assert router.seen[1].handle == next(iter(router.issued))


@every_library
@every_stream
def test_an_asynchronous_one_does_too(library: ModuleType, stream: bool) -> None:
    """The same through ``AsyncClient``, read line by line."""
    router = FakeRouter(library=library)

    async def talk() -> None:
        transport = library.MockTransport(router)
        async with OURS[library.__name__].AsyncClient(transport=transport) as client:
            with kvloom.conversation("t"):
                for messages in (HELLO, NEXT):
                    body = _body(messages, stream=stream)
                    url = f"{URL}/chat/completions"
                    async with client.stream("POST", url, json=body) as answer:
                        assert [line async for line in answer.aiter_lines()]

    asyncio.run(talk())

    assert [seen.conversation for seen in router.seen] == [ID, ID]
    assert router.seen[1].handle == next(iter(router.issued))


@every_library
@pytest.mark.parametrize("name", ["X-Session-ID", "x-session-id"])
def test_a_clients_own_header_is_a_default(library: ModuleType, name: str) -> None:
    """The conversation of a block is nearer, and the header of a call is nearest."""
    router = FakeRouter()
    client = _client(router, library, headers={name: "default-of-mine"})
    url, body = f"{URL}/chat/completions", _body(HELLO)

    with client:
        client.post(url, json=body)
        with kvloom.conversation("t"):
            client.post(url, json=body)
            client.post(url, json=body, headers={name: "call-of-mine"})

    told = [seen.conversation for seen in router.seen]
    assert told == ["default-of-mine", ID, "call-of-mine"]


@every_library
def test_the_openai_client_of_a_framework_is_carried(library: ModuleType) -> None:
    """openai's own client with our ``http_client``: conversation, handle, retry."""
    router = FakeRouter()
    client = openai.OpenAI(
        base_url=URL, api_key="k", http_client=_client(router, library)
    )

    with kvloom.conversation("t"):
        client.chat.completions.create(model="m", messages=HELLO)
        router.failures = [503]
        client.chat.completions.create(model="m", messages=NEXT)

    _, attempt, retry = router.seen
    assert (attempt.handle, retry.handle) == (next(iter(router.issued)), None)
    assert attempt.conversation == retry.conversation == ID


@every_library
def test_a_body_keeps_its_own_bytes(library: ModuleType) -> None:
    """What is added stands in front; all that I wrote stays as I wrote it."""
    router = FakeRouter()
    odd = (
        b'{ "model": "m", "messages": [{"role":"user","content":"\\u00e9 \xc3\xa9"}] }'
    )
    headers = {"content-type": "application/json", "x-mine": "1"}

    with _client(router, library) as client:
        client.post(f"{URL}/chat/completions", content=odd, headers=headers)
        with kvloom.conversation("t"):
            client.post(f"{URL}/chat/completions", content=odd, headers=headers)
            client.post(f"{URL}/chat/completions", content=odd, headers=headers)

    without, first, second = router.seen
    assert without.content == first.content == odd
    assert second.content.endswith(odd[1:])
    assert second.handle is not None
    assert second.headers["content-length"] == str(len(second.content))
    assert (without.conversation, second.headers["x-mine"]) == (None, "1")


@every_library
def test_what_is_no_turn_passes_untouched(library: ModuleType) -> None:
    """Other paths, other methods, bodies that are no JSON or still to be read."""
    router = FakeRouter(failures=[404] * 4)

    with _client(router, library) as client, kvloom.conversation("t"):
        client.get(f"{URL}/chat/completions")
        client.post(f"{URL}/embeddings", json={"model": "m"})
        client.post(f"{URL}/chat/completions", content=b"no json")
        client.post(f"{URL}/chat/completions", content=iter([b"{", b"}"]))

    assert [seen.conversation for seen in router.seen] == [None] * 4


def test_an_openai_client_of_ours_is_not_carried_twice() -> None:
    """Both at once are one: the same handle is not kept by each."""
    router = FakeRouter()
    inner, outer = kvloom.MemoryStore(), kvloom.MemoryStore()
    http_client = _client(router, http, kvloom_store=inner)
    client = OpenAI(
        base_url=URL, api_key="k", http_client=http_client, kvloom_store=outer
    )

    with kvloom.conversation("t"):
        client.chat.completions.create(model="m", messages=HELLO)

    assert "1 handles" in repr(outer)
    assert "0 handles" in repr(inner)


@every_library
def test_proxies_of_the_environment_are_honoured(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that carries conversations goes through the company's proxy."""
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.invalid:3128")
    with OURS[library.__name__].Client() as ours, library.Client() as stock:
        url = library.URL("https://api.example")
        proxied = ours._transport_for_url(url)

        assert proxied is not ours._transport
        assert type(proxied) is type(stock._transport_for_url(url))
        assert isinstance(ours, library.Client)


@every_library
@pytest.mark.parametrize("encoding", ["gzip", "br"])
def test_a_compressed_answer_is_read_or_left(
    library: ModuleType, encoding: str
) -> None:
    """gzip is understood; what is not costs the handle and nothing else."""
    router = FakeRouter()
    with _client(router, library) as plain, kvloom.conversation("t"):
        whole = plain.post(f"{URL}/chat/completions", json=_body(HELLO)).content
    packed = gzip.compress(whole) if encoding == "gzip" else b"?" + whole

    class Packed(library.SyncByteStream):  # type: ignore[name-defined,misc]
        def __iter__(self) -> Any:
            yield from (packed[:7], packed[7:])

    def answer(request: Any) -> Any:
        headers = {"content-encoding": encoding, "content-type": "application/json"}
        return library.Response(200, stream=Packed(), headers=headers)

    store = kvloom.MemoryStore()
    client = OURS[library.__name__].Client(
        transport=library.MockTransport(answer), kvloom_store=store
    )
    with client, kvloom.conversation("t"):
        url = f"{URL}/chat/completions"
        with client.stream("POST", url, json=_body(HELLO)) as response:
            raw = b"".join(response.iter_raw())

    assert raw == packed
    assert ("1 handles" in repr(store)) == (encoding == "gzip")


@every_library
def test_failures_stay_the_librarys_own(library: ModuleType) -> None:
    """A lost connection raises what httpx raises, and events tell of it."""
    events: list[Event] = []
    router = FakeRouter(drops_after=2, failures=[503])
    client = _client(router, library, kvloom_events=events.append)
    url = f"{URL}/chat/completions"

    with client, kvloom.conversation("t"):
        assert client.post(url, json=_body(HELLO)).status_code == 503
        with pytest.raises(library.ReadError):
            client.post(url, json=_body(HELLO, stream=True))

    assert [e.status for e in events if isinstance(e, TurnFailed)] == [503]
    ended = [e for e in events if isinstance(e, TurnEnded)]
    assert [e.ending for e in ended] == [Ending.BROKEN]
    assert json.dumps([str(event) for event in events]).count("kvl1.") == 0
