"""kvloom's OpenAI clients at work: a thousand conversations, a real socket."""

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
from e2e.test_sdk_openai import (
    HELLO,
    ID,
    NEXT,
    _a_create,
    _a_stream,
    _async_client,
    _create_stream,
)

import kvloom
from kvloom.openai import AsyncOpenAI, OpenAI


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
