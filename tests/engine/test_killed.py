"""kill -9 of prefill, decode and router, at each stage of a turn.

Whoever is left serves, or the client gets an error at once; nothing stays held, and
whoever comes back serves as before. Answers are a fresh engine's.
"""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from duo import Duo
from letters import Messages, letter, user
from shelf import THROUGH_PREFILL, Shelf
from waiting import attempts

from kvloom.protocol import PLAN_HEADER, PlanReport
from kvloom_server.cluster.engine_args import Role
from kvloom_server.cluster.ports import free_ports

RUNNING = "vllm:num_requests_running"
LONG = 3
"""Times a letter's text: prefill takes seconds for it."""


class Router:
    """``kvloom serve`` over the two engines, in a process of its own."""

    def __init__(self, duo: Duo, log: Path) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self._duo = duo
        self._log = log
        self._http = httpx.Client(timeout=120)

    def start(self) -> None:
        """Start it, and wait until it knows both engines and their leases."""
        command = [sys.executable, "-m", "kvloom_server", "serve"]
        command += [f"--port={self.url.rpartition(':')[2]}", "--returns=lazy"]
        command += [f"--prefill={self._duo.member(Role.PREFILL)}"]
        command += [f"--decode={self._duo.member(Role.DECODE)}"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=self._duo.environment | THROUGH_PREFILL,
            )
        self.until("up", "up")

    def until(self, prefill: str, decode: str) -> None:
        """Wait until it says this of the engines."""
        for _ in attempts(f"the router to see {prefill} and {decode}"):
            try:
                said = self._http.get(f"{self.url}/health").json()
            except httpx.TransportError:
                continue
            states = {*said["prefill"].values()}, {*said["decode"].values()}
            feeds = {*said["lease_feeds"].values()}
            if states == ({prefill}, {decode}) and (
                {prefill, decode} != {"up"} or feeds == {"live"}
            ):
                return

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()
        self._http.close()

    def ask(self, messages: Messages, name: str, **body: Any) -> httpx.Response:
        """One turn, whole."""
        return self._http.post(
            f"{self.url}/v1/chat/completions",
            json=_body(messages, **body),
            headers={"X-Session-ID": name},
        )

    @contextmanager
    def stream(self, messages: Messages, name: str, **body: Any) -> Iterator[Any]:
        """The lines of a streamed turn."""
        with self._http.stream(
            "POST",
            f"{self.url}/v1/chat/completions",
            json=_body(messages, stream=True, **body),
            headers={"X-Session-ID": name},
        ) as answer:
            yield answer.iter_lines()


def _body(messages: Messages, **more: Any) -> dict[str, Any]:
    common = {"model": "small", "messages": messages, "temperature": 0}
    return {**common, "max_tokens": 12, "return_token_ids": True, **more}


@pytest.fixture(scope="module")
def duo(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duo]:
    shelf.clear()
    with Duo(tmp_path_factory.mktemp("killed"), decode_args=()) as opened:
        yield opened


@pytest.fixture
def router(duo: Duo, tmp_path: Path) -> Iterator[Router]:
    """A router; at the end of each test both engines hold nothing."""
    opened = Router(duo, tmp_path / "router.log")
    try:
        opened.start()
        yield opened
    finally:
        opened.close()
    duo.assert_nothing_is_held()


def report(answer: httpx.Response) -> PlanReport:
    assert answer.status_code == 200, answer.text
    found = PlanReport.decode_header(answer.headers[PLAN_HEADER])
    assert found is not None
    return found


def ids(answer: httpx.Response) -> list[int]:
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def after(messages: Messages, answer: httpx.Response, text: str) -> Messages:
    said = answer.json()["choices"][0]["message"]["content"]
    return [*messages, {"role": "assistant", "content": said}, user(text)]


@contextmanager
def under_way(router: Router, duo: Duo, role: Role, number: int) -> Iterator[Any]:
    """A turn whose leg at this engine is running when the block begins."""
    messages = letter(number, times=LONG)
    more = {} if role is Role.PREFILL else {"max_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        turn = pool.submit(router.ask, messages, f"under-way-{number}", **more)
        for _ in attempts(f"the leg at {role} to run"):
            if duo.metric(role, RUNNING) == 1:
                break
        yield messages, turn


def test_prefill_dies_while_it_computes(duo: Duo, router: Router) -> None:
    """Decode computes the prompt; once prefill is back turns go through it."""
    with under_way(router, duo, Role.PREFILL, 1) as (messages, turn):
        duo.kill(Role.PREFILL)
        answer: httpx.Response = turn.result()
    assert report(answer).plan == "cold"
    assert report(answer).prefill is None
    router.until("down", "up")
    again = after(messages, answer, "And at night?")
    meanwhile = router.ask(again, "under-way-1")
    assert report(meanwhile).reason == "prefill_down"
    duo.restart(Role.PREFILL)
    router.until("up", "up")
    assert ids(answer) == duo.oracle(messages)
    assert ids(meanwhile) == duo.oracle(again)
    last = router.ask(again, "under-way-1")
    assert report(last).returned_tokens
    assert ids(last) == ids(meanwhile)


def test_decode_dies_while_prefill_computes(duo: Duo, router: Router) -> None:
    """The only decode engine is gone: an error, at once, and prefill lets go of what
    it kept for it. Back again, the same turn is answered."""
    with under_way(router, duo, Role.PREFILL, 2) as (messages, turn):
        duo.kill(Role.DECODE)
        answer: httpx.Response = turn.result()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"]
    duo.restart(Role.DECODE)
    router.until("up", "up")
    answer = router.ask(messages, "under-way-2")
    assert ids(answer) == duo.oracle(messages)


def test_decode_dies_in_the_middle_of_an_answer(duo: Duo, router: Router) -> None:
    """The stream ends in an error event, and the next turn of the conversation starts
    anew on the engine that came back, where the lease is gone."""
    messages = letter(3)
    first = router.ask(messages, "killed-3")
    again = after(messages, first, "And at night?")
    events: list[str] = []
    with router.stream(again, "killed-3", max_tokens=400, ignore_eos=True) as lines:
        events.append(next(lines))
        duo.kill(Role.DECODE)
        events += lines
    assert '"error"' in next(line for line in reversed(events) if line)
    duo.restart(Role.DECODE)
    router.until("up", "up")
    second = router.ask(again, "killed-3")
    assert report(second).reason in ("engine_gone", "lease_gone")
    assert ids(second) == duo.oracle(again)


def test_prefill_dies_between_turns(duo: Duo, router: Router) -> None:
    """What decode holds goes to whoever prefills next."""
    messages = letter(4)
    first = router.ask(messages, "killed-4")
    duo.restart(Role.PREFILL)
    router.until("up", "up")
    again = after(messages, first, "And at night?")
    second = router.ask(again, "killed-4")
    assert report(second).plan == "return"
    returned = report(second).returned_tokens or 0
    assert returned >= (report(first).prompt_tokens or 0)
    assert ids(second) == duo.oracle(again)


@pytest.mark.parametrize("role", list(Role))
def test_the_router_dies_while_an_engine_works(
    duo: Duo, router: Router, role: Role
) -> None:
    """Both engines drop the turn; the next router reuses what the last turn left,
    and answers it."""
    number = 5 if role is Role.PREFILL else 6
    name = f"under-way-{number}"
    messages = letter(number, times=LONG)
    first = router.ask(messages, name)
    duo.forget()
    gone = threading.Event()

    # Of more than one step, so that the engine says that it is running.
    more = after(messages, first, "And " * 2600)

    def broken() -> None:
        with pytest.raises(httpx.TransportError):
            router.ask(more, name, max_tokens=400, ignore_eos=True)
        gone.set()

    with ThreadPoolExecutor(1) as pool:
        turn: Future[None] = pool.submit(broken)
        for _ in attempts(f"the leg at {role} to run"):
            if duo.metric(role, RUNNING) == 1:
                break
        router.kill()
        turn.result()
    assert gone.is_set()
    for each in Role:
        for _ in attempts(f"{each} to drop the turn"):
            if duo.metric(each, RUNNING) == 0:
                break
    router.start()
    duo.forget()
    again = after(messages, first, "And at night?")
    answer = router.ask(again, name)
    assert report(answer).plan == "return"
    assert (report(answer).returned_tokens or 0) >= (report(first).prompt_tokens or 0)
    assert ids(answer) == duo.oracle(again)
