"""kvloom's OpenAI clients against a fake router, and what its users rely on."""

import asyncio
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from e2e.test_sdk_fake import IS_OPENAI_3, FakeRouter, http

import kvloom
from kvloom.openai import AsyncOpenAI, OpenAI, report
from kvloom.protocol import conversation_id

URL = "http://fake/v1"
HELLO: list[Any] = [{"role": "user", "content": "2 + 2?"}]
NEXT: list[Any] = [
    *HELLO,
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "and 3 + 3?"},
]
ID = conversation_id(namespace="", thread="t")


def _client(router: FakeRouter, **options: Any) -> OpenAI:
    options = {
        "base_url": URL,
        "api_key": "k",
        "http_client": router.client(),
    } | options
    return OpenAI(**options)


def _async_client(router: FakeRouter, **options: Any) -> AsyncOpenAI:
    client = router.async_client()
    return AsyncOpenAI(base_url=URL, api_key="k", http_client=client, **options)


def _create(client: Any, messages: list[Any]) -> Any:
    return client.chat.completions.create(model="m", messages=messages)


def _create_stream(client: Any, messages: list[Any]) -> Any:
    chunks = client.chat.completions.create(model="m", messages=messages, stream=True)
    return list(chunks)[-1]


async def _a_create(client: Any, messages: list[Any]) -> Any:
    return await client.chat.completions.create(model="m", messages=messages)


async def _a_stream(client: Any, messages: list[Any]) -> Any:
    stream = await client.chat.completions.create(
        model="m", messages=messages, stream=True
    )
    return [chunk async for chunk in stream][-1]


def test_the_time_to_first_token_is_that_of_the_stream() -> None:
    """The report of a stream says how long I waited for its first chunk."""
    router = FakeRouter(ttft_s=0.25)
    client = _client(router, kvloom_clock=router.clock)

    with client.conversation("t"):
        stream = client.chat.completions.create(model="m", messages=HELLO, stream=True)
        chunks = list(stream)
        whole = _create(client, HELLO)

    reports = [told for chunk in chunks if (told := report(chunk))]
    assert [told.ttft_s for told in reports] == [0.25]
    assert report(stream) == reports[0]
    told = report(whole)
    assert told is not None
    assert told.ttft_s is None


def test_a_retry_keeps_the_conversation_and_drops_the_handle() -> None:
    """A handle that an attempt has used is not tried again by the next one."""
    router = FakeRouter()
    client = _client(router)

    with client.conversation("t"):
        _create(client, HELLO)
        router.failures = [503]
        _create(client, NEXT)

    _, attempt, retry = router.seen
    assert (attempt.handle, retry.handle) == (next(iter(router.issued)), None)
    assert attempt.conversation == retry.conversation == ID
    assert attempt.body["messages"] == retry.body["messages"] == NEXT


def test_a_stream_that_broke_off_leaves_no_handle() -> None:
    """An answer I never got whole does not shape my next turn."""
    router = FakeRouter(breaks_off=True)
    client = _client(router)

    with client.conversation("t"):
        _create_stream(client, HELLO)
        _create_stream(client, NEXT)

    assert router.seen[1].handle is None


@pytest.mark.parametrize("is_raw", [False, True])
def test_a_stream_without_done_leaves_no_handle(is_raw: bool) -> None:
    """Only ``[DONE]`` says that a stream was whole, finish and handle or not."""
    router = FakeRouter(omits_done=True)
    client = _client(router)

    with client.conversation("t"):
        if is_raw:
            calls = client.chat.completions.with_streaming_response
            with calls.create(model="m", messages=HELLO, stream=True) as response:
                assert "kv_transfer_params" in list(response.iter_lines())[-2]
        else:
            _create_stream(client, HELLO)
        _create(client, NEXT)

    assert router.seen[1].handle is None


@pytest.mark.parametrize("is_raw", [False, True])
def test_no_chunk_waits_for_the_next(is_raw: bool) -> None:
    """What has arrived is mine at once; nothing is held back to be looked at."""
    router = FakeRouter()
    client = _client(router)

    with client.conversation("t"):
        if is_raw:
            calls = client.chat.completions.with_streaming_response
            with calls.create(model="m", messages=HELLO, stream=True) as response:
                taken = [router.pulled for _ in response.iter_bytes()]
        else:
            stream = client.chat.completions.create(
                model="m", messages=HELLO, stream=True
            )
            taken = [router.pulled for _ in stream]

    assert taken == list(range(1, len(taken) + 1))


def test_a_raw_stream_tells_its_time_to_first_token() -> None:
    """Also where nobody parses, the report knows the wait."""
    router = FakeRouter(ttft_s=0.25)
    client = _client(router, kvloom_clock=router.clock)
    calls = client.chat.completions.with_streaming_response

    with (
        client.conversation("t"),
        calls.create(model="m", messages=HELLO, stream=True) as response,
    ):
        list(response.iter_lines())

    told = report(response)
    assert told is not None
    assert told.ttft_s == 0.25


def test_an_answer_that_the_engine_aborted_leaves_no_handle() -> None:
    """An answer that ended in an engine's error is not built upon."""
    router = FakeRouter(finish="error")
    client = _client(router)

    with client.conversation("t"):
        _create_stream(client, HELLO)
        _create_stream(client, NEXT)

    assert router.seen[1].handle is None


def test_a_stream_that_i_leave_early_leaves_no_handle() -> None:
    """Closing a stream before its end stores nothing of it."""
    router = FakeRouter()
    client = _client(router)

    with client.conversation("t"):
        with client.chat.completions.create(
            model="m", messages=HELLO, stream=True
        ) as stream:
            next(iter(stream))
        _create(client, NEXT)

    assert router.seen[1].handle is None


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ({}, [{"role": "user", "content": "2 + 5?"}, *NEXT[1:]]),
        ({}, []),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, NEXT),
        ({"extra_body": {"cache_salt": "other"}}, NEXT),
        ({"model": "other"}, NEXT),
    ],
    ids=["edited", "shorter", "tools", "salt", "model"],
)
def test_another_history_goes_without_the_handle(
    change: dict[str, Any], messages: list[Any]
) -> None:
    """What I edited, cut or equipped anew does not follow an old handle."""
    router = FakeRouter()
    client = _client(router)

    with client.conversation("t"):
        _create(client, HELLO)
        arguments = {"model": "m", "messages": messages} | change
        client.chat.completions.create(**arguments)
        _create(client, NEXT)

    assert router.seen[1].handle is None
    assert router.seen[2].handle == next(iter(router.issued)), "it is still there"


def test_what_i_say_in_the_call_wins() -> None:
    """My own header and body are sent as I wrote them."""
    router = FakeRouter()
    client = _client(router)
    mine = {"kvloom": "kvl1.mine_mine_mine_mine"}

    with client.conversation("t"):
        _create(client, HELLO)
        client.chat.completions.create(
            model="m",
            messages=NEXT,
            extra_headers={"x-session-id": "my-own-name"},
            extra_body={"kv_transfer_params": mine},
        )

    assert router.seen[1].conversation == "my-own-name"
    assert router.seen[1].body["kv_transfer_params"] == mine


def test_a_conversation_can_be_left_out_of_one_call() -> None:
    """A call with the header taken away has no conversation."""
    router = FakeRouter()
    client = _client(router)

    with client.conversation("t"):
        client.chat.completions.create(
            model="m", messages=HELLO, extra_headers={"X-Session-ID": openai.Omit()}
        )

    assert router.seen[0].conversation is None


def test_the_context_wins_over_the_clients_default_header() -> None:
    """A conversation is nearer than a header given to the constructor."""
    router = FakeRouter()
    client = _client(router, default_headers={"x-session-id": "default-name"})

    with client.conversation("t"):
        _create(client, HELLO)
    _create(client, HELLO)

    assert [seen.conversation for seen in router.seen] == [ID, "default-name"]


def test_options_keep_the_conversation() -> None:
    """``with_options`` and ``copy`` give me a client in the same conversation."""
    router = FakeRouter()
    client = _client(router, kvloom_namespace="app", kvloom_returns="off")

    with client.conversation("t"):
        _create(client.with_options(timeout=5), HELLO)
        _create(client.copy(max_retries=0), NEXT)

    ours = conversation_id(namespace="app", thread="t")
    assert [seen.conversation for seen in router.seen] == [ours, ours]
    assert router.seen[1].handle == next(iter(router.issued))
    assert [seen.headers["x-kvloom-return"] for seen in router.seen] == ["off", "off"]


def test_the_ambient_conversation_reaches_every_client() -> None:
    """``kvloom.conversation`` needs no client, and each uses its own namespace."""
    router = FakeRouter()
    clients = [_client(router), _client(router, kvloom_namespace="app")]

    with kvloom.conversation("t", lane="math"):
        for client in clients:
            _create(client, HELLO)

    assert [seen.conversation for seen in router.seen] == [
        conversation_id(namespace="", thread="t", lane="math"),
        conversation_id(namespace="app", thread="t", lane="math"),
    ]


def test_other_requests_are_left_alone() -> None:
    """Listing models is no turn of a conversation."""
    router = FakeRouter(failures=[404])
    client = _client(router)

    with client.conversation("t"), pytest.raises(openai.NotFoundError):
        client.models.list()

    assert router.seen[0].conversation is None


def test_openais_exceptions_are_unchanged() -> None:
    """A refused request raises what openai raises, and is not sent twice."""
    router = FakeRouter(failures=[400])

    with _client(router).conversation("t"), pytest.raises(openai.BadRequestError):
        _create(_client(router), HELLO)

    assert len(router.seen) == 1


def test_a_wrong_return_mode_is_refused_at_once() -> None:
    """A misspelled mode tells me which there are."""
    with pytest.raises(ValueError, match='"off", "lazy"'):
        OpenAI(api_key="k", kvloom_returns="eager")  # type: ignore[arg-type]


def test_our_clients_are_openais() -> None:
    """Whoever checks for openai's clients accepts ours."""
    assert issubclass(OpenAI, openai.OpenAI)
    assert issubclass(AsyncOpenAI, openai.AsyncOpenAI)
    with OpenAI(api_key="k") as client:
        assert client.with_options(timeout=1).__class__ is OpenAI


@pytest.mark.parametrize(("store", "num_talks"), [("memory", 1000), ("sqlite", 200)])
def test_a_thousand_conversations_never_see_each_others_handles(
    store: str, num_talks: int, tmp_path: Path
) -> None:
    """However a thousand conversations interleave, no handle crosses over."""
    router, order = FakeRouter(), random.Random(7)
    handles: kvloom.HandleStore = kvloom.MemoryStore()
    if store == "sqlite":
        handles = kvloom.SQLiteStore(tmp_path / "handles", timeout_s=30)

    async def talk(client: AsyncOpenAI, thread: str) -> None:
        messages: list[Any] = [{"role": "user", "content": "the same for all"}]
        with client.conversation(thread):
            for _ in range(2):
                for _ in range(order.randrange(4)):
                    await asyncio.sleep(0)
                await _a_create(client, messages)
                answer = {"role": "assistant", "content": "four"}
                messages += [answer, HELLO[0]]

    async def all_talk() -> None:
        client = _async_client(router, kvloom_store=handles)
        await asyncio.gather(*(talk(client, str(n)) for n in range(num_talks)))

    asyncio.run(all_talk())

    carried = [seen for seen in router.seen if seen.handle]
    assert len({seen.conversation for seen in router.seen}) == num_talks
    assert len(carried) == num_talks
    assert all(router.issued[s.handle] == s.conversation for s in carried if s.handle)
    assert len({seen.handle for seen in carried}) == num_talks, "each is used once"
    if isinstance(handles, kvloom.SQLiteStore):
        handles.close()


class _Handler(BaseHTTPRequestHandler):
    """The fake router behind a real socket."""

    router: FakeRouter

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        request = http.Request(
            "POST",
            f"http://fake{self.path}",
            content=content,
            headers=dict(self.headers),
        )
        answer = self.router(request)
        self.send_response(answer.status_code)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.read())

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""


@pytest.fixture
def served() -> Iterator[tuple[FakeRouter, str]]:
    """A fake router and its URL."""
    router = FakeRouter()
    handler = type("Handler", (_Handler,), {"router": router})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield router, f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_it_works_over_a_real_socket(served: tuple[FakeRouter, str]) -> None:
    """A real transport sends the same, and nothing of our own bookkeeping."""
    router, url = served

    async def go_on() -> None:
        async with AsyncOpenAI(base_url=url, api_key="k", kvloom_store=store) as client:
            with client.conversation("t"):
                await _a_stream(client, NEXT)

    store = kvloom.MemoryStore()
    with (
        OpenAI(base_url=url, api_key="k", kvloom_store=store) as client,
        client.conversation("t"),
    ):
        _create_stream(client, HELLO)
    asyncio.run(go_on())

    assert [seen.conversation for seen in router.seen] == [ID, ID]
    assert router.seen[1].handle == next(iter(router.issued))


def test_the_private_hooks_are_where_we_found_them() -> None:
    """This openai calls the hooks we override; if not, this says so first."""
    for base in (openai.OpenAI, openai.AsyncOpenAI):
        assert callable(base._build_request)
        assert callable(base._process_response)
        assert callable(base._process_response_data)
        assert callable(base.request)
    assert IS_OPENAI_3 or openai.__version__.startswith("2.")
