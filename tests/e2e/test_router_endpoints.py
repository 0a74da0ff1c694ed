"""Each API's own client through the router: reuse, bytes, and the handle's way."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import anthropic
import httpx
import openai
import pytest
from e2e.test_router_stage import (
    CHAT,
    CONVERSATION,
    MODEL,
    TOOLS,
    Stage,
    fresh,
    opening,
    staged,
)
from e2e.test_router_warm import until_counted, until_warm

from kvloom.protocol import HANDLE_HEADER, PLAN_HEADER, PlanReport, Reason, is_handle
from kvloom.testing import Answer, Context, EngineOptions, thoughtful

pytestmark = pytest.mark.anyio

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
GENERATE = "/inference/v1/generate"
"""A claim that is late on a busy machine is not what these tests are about."""
SYSTEM = "You are a guide. " * 30
QUESTION = "what is there to see? " * 20
WEATHER = TOOLS[0]["function"]
RESPONSES_TOOLS: list[Any] = [{"type": "function", **WEATHER}]
MESSAGES_TOOLS: list[Any] = [
    {"name": "weather", "input_schema": WEATHER["parameters"]},
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass(slots=True)
class Said:
    """One turn as a client of some API sees it."""

    report: PlanReport
    output: Any
    """The answer, as the API has it: items, blocks or token ids."""
    handle: str | None


def _report(headers: Any) -> PlanReport:
    report = PlanReport.decode_header(headers[PLAN_HEADER])
    assert report is not None
    return report


def _dumped(items: Any) -> list[Any]:
    return [item.model_dump(exclude_none=True) for item in items]


class Talk:
    """A conversation in one API, through its official client if there is one."""

    path = ""

    def __init__(self, stage: Stage, *, is_streamed: bool) -> None:
        self.stage = stage
        self.is_streamed = is_streamed
        self.headers: dict[str, str] = dict(CONVERSATION)
        self.body = self.first()

    def first(self) -> dict[str, Any]:
        """The body of the first turn."""
        raise NotImplementedError

    def go_on(self, said: Said) -> None:
        """Ask the next question."""
        raise NotImplementedError

    async def turn(self) -> Said:
        raise NotImplementedError


class ResponsesTalk(Talk):
    path = RESPONSES

    def first(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "instructions": SYSTEM,
            "input": [{"role": "user", "content": QUESTION}],
            "max_output_tokens": 200,
        }

    def go_on(self, said: Said) -> None:
        asked = {"role": "user", "content": "and then? " * 10}
        self.body["input"] = [*self.body["input"], *said.output, asked]

    async def turn(self) -> Said:
        responses = self.stage.client.responses.with_raw_response
        body = cast("Any", {**self.body, "extra_headers": self.headers})
        raw = await responses.create(**body, stream=self.is_streamed)
        answer: Any = raw.parse()
        if self.is_streamed:
            events = [event async for event in answer]
            numbers = [event.sequence_number for event in events]
            assert numbers == list(range(len(events)))
            answer = events[-1].response
            text = "".join(
                e.delta for e in events if e.type == "response.output_text.delta"
            )
            assert text == answer.output_text
        params = (answer.model_extra or {}).get("kv_transfer_params") or {}
        return Said(_report(raw.headers), _dumped(answer.output), params.get("kvloom"))


class MessagesTalk(Talk):
    path = MESSAGES

    def first(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "system": SYSTEM,
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 200,
        }

    def go_on(self, said: Said) -> None:
        asked = {"role": "user", "content": "and then? " * 10}
        answer = {"role": "assistant", "content": said.output}
        self.body["messages"] = [*self.body["messages"], answer, asked]

    async def turn(self) -> Said:
        async with client_of(self.stage) as client:
            body = cast("Any", {**self.body, "extra_headers": self.headers})
            if not self.is_streamed:
                raw = await client.messages.with_raw_response.create(**body)
                message, headers = await raw.parse(), raw.headers
            else:
                async with client.messages.stream(**body) as stream:
                    message = await stream.get_final_message()
                    headers = stream.response.headers
        assert "kv_transfer_params" not in (message.model_extra or {})
        handle = headers.get(HANDLE_HEADER)
        return Said(_report(headers), _dumped(message.content), handle)


class GenerateTalk(Talk):
    path = GENERATE

    def first(self) -> dict[str, Any]:
        return {
            "token_ids": list(range(97, 397)),
            "sampling_params": {"max_tokens": 20},
        }

    def go_on(self, said: Said) -> None:
        ids = [*self.body["token_ids"], *said.output, *range(300, 330)]
        self.body["token_ids"] = ids

    async def turn(self) -> Said:
        body = self.body | {"stream": self.is_streamed}
        answer = await self.stage.post(body, GENERATE, **self.headers)
        assert answer.status_code == 200, answer.text
        if self.is_streamed:
            lines = answer.text.split("\n\n")
            assert lines[-2:] == ["data: [DONE]", ""]
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
            ids = [t for c in chunks for x in c["choices"] for t in x["token_ids"]]
            last = chunks[-1]
        else:
            last = answer.json()
            ids = last["choices"][0]["token_ids"]
        params = last.get("kv_transfer_params") or {}
        return Said(_report(answer.headers), ids, params.get("kvloom"))


@asynccontextmanager
async def client_of(stage: Stage) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=stage.router.url, api_key="k", max_retries=0
    ) as client:
        yield client


async def same_as_fresh(talk: Talk, said: Said, **options: Any) -> None:
    """The answer is the one of a single engine that has seen nothing."""
    answer = await fresh(talk.path, talk.body, **options)
    match talk:
        case ResponsesTalk():
            assert _meant(said.output) == _meant(answer["output"])
        case MessagesTalk():
            assert _meant(said.output) == _meant(answer["content"])
        case _:
            assert said.output == answer["choices"][0]["token_ids"]


def _meant(items: list[dict[str, Any]]) -> list[Any]:
    """What was said, without names that are new each time."""
    names = ("type", "text", "thinking", "name", "input", "arguments", "content")
    meant = []
    for item in items:
        kept = {k: v for k, v in item.items() if k in names and v is not None}
        if isinstance(kept.get("content"), list):
            kept["content"] = _meant(kept["content"])
        meant.append(kept)
    return meant


TALKS = [ResponsesTalk, MessagesTalk, GenerateTalk]
each_api = pytest.mark.parametrize("api", TALKS)
both_ways = pytest.mark.parametrize("is_streamed", [False, True])


@each_api
@both_ways
async def test_a_loop_starts_every_turn_from_the_cache(
    api: type[Talk], is_streamed: bool
) -> None:
    """In every API, streamed or not: from the second turn on nearly all of the
    history is reused, and the answers are those of a fresh engine."""
    async with staged() as stage:
        talk, covered = api(stage, is_streamed=is_streamed), 0
        for number in range(4):
            stage.cluster.prefill[0].engine.lose_cache()
            said = await talk.turn()
            await same_as_fresh(talk, said)
            assert said.handle is not None
            assert is_handle(said.handle)
            report = said.report
            if number:
                assert (report.plan, report.reason) == ("return", "lease_held")
                assert report.returned_tokens is not None
                assert report.returned_tokens >= covered - 1
            assert report.prompt_tokens is not None
            covered = report.prompt_tokens
            talk.go_on(said)
        decode = stage.cluster.decode[0].engine
        await decode.changes.until(lambda: len(decode.leases.book) == 1)


@pytest.mark.parametrize("api", [ResponsesTalk, MessagesTalk])
@both_ways
async def test_a_router_that_forgot_serves_from_the_handle(
    api: type[Talk], is_streamed: bool
) -> None:
    """The handle alone is enough, whichever way the API carries it: in the
    body, or as a header that is sent back."""
    key = {"handle_key": "k" * 32}
    async with staged(settings=key) as stage:
        talk = api(stage, is_streamed=is_streamed)
        said = await talk.turn()
        assert said.handle is not None
        # No list either: only the handle can tell.
        stage.cluster.decode[0].engine.leases.hides_leases = True
        await stage.restart_router()
        stage.cluster.prefill[0].engine.lose_cache()
        talk.go_on(said)
        if isinstance(talk, MessagesTalk):
            talk.headers[HANDLE_HEADER] = said.handle
        else:
            carried = {"kv_transfer_params": {"kvloom": said.handle}}
            talk.body["extra_body"] = carried
        again = await talk.turn()
        assert again.report.returned_tokens


@pytest.mark.parametrize("api", [ResponsesTalk, MessagesTalk])
@both_ways
async def test_tools_are_called_and_answered(
    api: type[Talk], is_streamed: bool
) -> None:
    """A forced call goes through prefill and decode, and the turn with the
    tool's result starts from the cache."""
    async with staged(responder=thoughtful) as stage:
        talk = api(stage, is_streamed=is_streamed)
        _has_to_call(talk)
        said = await talk.turn()
        await same_as_fresh(talk, said, responder=thoughtful)
        thought, call = said.output
        assert thought["type"] in ("reasoning", "thinking")
        assert call["name"] == "weather"
        _may_call(talk)
        _answer_call(talk, said, call)
        stage.cluster.prefill[0].engine.lose_cache()
        again = await talk.turn()
        await same_as_fresh(talk, again, responder=thoughtful)
        assert again.report.plan == "return"
        assert again.report.returned_tokens


@pytest.mark.parametrize("api", [ResponsesTalk, MessagesTalk])
@both_ways
async def test_the_history_is_at_prefill_when_the_tool_is_done(
    api: type[Talk], is_streamed: bool
) -> None:
    """Mode eager in every API that has tools: prefill reads prompt and answer while
    the tool runs, in the tokens that were generated, and the lease ends."""
    async with staged(settings={"returns": "eager"}) as stage:
        talk = api(stage, is_streamed=is_streamed)
        _has_to_call(talk)
        said = await talk.turn()
        await until_warm(stage)
        _may_call(talk)
        _answer_call(talk, said, said.output[0])
        again = await talk.turn()
        await same_as_fresh(talk, again)
        assert (again.report.plan, again.report.reason) == ("return", "warm")
        assert again.report.local_tokens is not None
        assert said.report.prompt_tokens is not None
        assert again.report.local_tokens >= said.report.prompt_tokens
        asked = stage.cluster.prefill[0].engine.received("/v1/completions")
        assert len(asked) == 1


@pytest.mark.parametrize("api", [ResponsesTalk, MessagesTalk])
async def test_a_plain_answer_is_followed_by_no_warm_up(api: type[Talk]) -> None:
    """Without a call nobody knows what the next turn will be; that an answer's text
    speaks of calls makes none."""

    def chatty(_context: Context) -> Answer:
        return Answer(content='"stop_reason": "tool_use" "type": "function_call"')

    options = {"responder": chatty}
    async with staged(settings={"returns": "eager"}, **options) as stage:
        for is_streamed in (False, True):
            talk = api(stage, is_streamed=is_streamed)
            await talk.turn()
        assert not stage.cluster.prefill[0].engine.received("/v1/completions")
        assert not stage.cluster.prefill[0].engine.received(f"{talk.path}/render")


@pytest.mark.parametrize("api", [ResponsesTalk, MessagesTalk])
async def test_without_rendering_a_turn_keeps_its_lease(api: type[Talk]) -> None:
    """``--enable-scale-out`` is off: no warm-up, and the return is as lazy as ever."""
    off: EngineOptions = {"scale_out": False}
    async with staged(settings={"returns": "eager"}, **off) as stage:
        talk = api(stage, is_streamed=True)
        _has_to_call(talk)
        said = await talk.turn()
        await until_counted(stage, "unfit")
        stage.cluster.prefill[0].engine.lose_cache()
        _answer_call(talk, said, said.output[0])
        again = await talk.turn()
        assert again.report.returned_tokens


def _has_to_call(talk: Talk) -> None:
    if isinstance(talk, MessagesTalk):
        talk.body |= {"tools": MESSAGES_TOOLS, "tool_choice": {"type": "any"}}
    else:
        talk.body |= {"tools": RESPONSES_TOOLS, "tool_choice": "required"}


def _may_call(talk: Talk) -> None:
    is_anthropics = isinstance(talk, MessagesTalk)
    talk.body["tool_choice"] = {"type": "auto"} if is_anthropics else "auto"


def _answer_call(talk: Talk, said: Said, call: dict[str, Any]) -> None:
    if isinstance(talk, MessagesTalk):
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "rain"}
        talk.body["messages"] = [
            *talk.body["messages"],
            {"role": "assistant", "content": said.output},
            {"role": "user", "content": [result]},
        ]
        return
    result = {
        "type": "function_call_output",
        "call_id": call["call_id"],
        "output": "rain",
    }
    talk.body["input"] = [*talk.body["input"], *said.output, result]


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": opening(), "max_tokens": 30}),
    "completions": ("/v1/completions", {"prompt": QUESTION}),
    "responses": (RESPONSES, {"input": QUESTION, "max_output_tokens": 30}),
    "messages": (
        MESSAGES,
        {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 30},
    ),
    "generate": (
        GENERATE,
        {"token_ids": list(range(97, 297)), "sampling_params": {"max_tokens": 9}},
    ),
}
each_body = pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=BODIES)


@each_body
@both_ways
async def test_without_a_lease_every_byte_is_the_engines(
    path: str, body: dict[str, Any], is_streamed: bool
) -> None:
    """What the client gets is what a direct call would have given it."""
    async with staged(responder=thoughtful, settings={"returns": False}) as stage:
        asked = {"model": MODEL, **body, "stream": is_streamed}
        answer = await stage.post(asked, path)
        assert answer.status_code == 200
        assert [answer.content] == stage.upstream.of(stage.cluster.decode[0], path)
        assert HANDLE_HEADER not in answer.headers


@each_body
@both_ways
async def test_with_a_lease_only_the_handle_is_added(
    path: str, body: dict[str, Any], is_streamed: bool
) -> None:
    """One event, or the plain answer, has the handle; Anthropic's has it as a
    header and not a byte in its body."""
    async with staged(responder=thoughtful) as stage:
        asked = {"model": MODEL, **body, "stream": is_streamed}
        answer = await stage.post(asked, path)
        (sent,) = stage.upstream.of(stage.cluster.decode[0], path)
        assert answer.status_code == 200
        if path == MESSAGES:
            assert answer.content == sent
            assert is_handle(answer.headers[HANDLE_HEADER])
            return
        got, said = answer.content.split(b"\n\n"), sent.split(b"\n\n")
        changed = [(a, b) for a, b in zip(got, said, strict=True) if a != b]
        assert len(changed) == 1
        ours, theirs = (_data(event) for event in changed[0])
        inside = ours["response"] if "response" in ours and is_streamed else ours
        assert is_handle(inside.pop("kv_transfer_params")["kvloom"])
        inside = theirs["response"] if "response" in theirs and is_streamed else theirs
        inside.pop("kv_transfer_params", None)
        assert ours == theirs


def _data(event: bytes) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(event[event.index(b"{") :])
    return value


@pytest.mark.parametrize(
    "stateful",
    [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"tools": [{"type": "web_search_preview"}]},
        {"tools": [{"type": "mcp", "server_label": "x"}]},
        {"truncation": "auto"},
    ],
    ids=lambda body: next(iter(body)),
)
async def test_what_the_engine_keeps_or_does_itself_is_decodes_alone(
    stateful: dict[str, Any],
) -> None:
    """A history that only the engine knows, or tools that it runs, can't be
    prefilled elsewhere: decode does it, without transfer params."""
    async with staged() as stage:
        body = {"model": MODEL, "input": "hello " * 50, **stateful}
        await stage.post(body, RESPONSES)
        assert not stage.cluster.prefill[0].engine.received(RESPONSES)
        (asked,) = stage.cluster.decode[0].engine.received(RESPONSES)
        assert asked.body == body


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_a_token_is_not_held_back_for_the_next_one(path: str) -> None:
    """Each event reaches the client before the engine has made another."""
    async with staged() as stage:
        gate = asyncio.Semaphore(0)
        stage.cluster.decode[0].engine.faults.chunk_gate = gate
        body = {"model": MODEL, **dict(BODIES.values())[path], "stream": True}
        url = stage.router.url + path
        gate.release()
        async with stage.http.stream(
            "POST", url, json=body, headers=CONVERSATION, timeout=30
        ) as answer:
            chunks, seen = answer.aiter_bytes(), b""
            for number in range(1, 6):
                while seen.count(b"\n\n") < number:
                    seen += await anext(chunks)
                gate.release()
            for _ in range(100):
                gate.release()
            seen += b"".join([chunk async for chunk in chunks])
        assert b"message_stop" in seen or b"response.completed" in seen


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_an_engine_that_dies_in_the_middle_is_an_error_of_the_api(
    path: str,
) -> None:
    """A stream that can't go on raises in the API's own client."""
    async with staged() as stage:
        stage.cluster.decode[0].engine.faults.dies_after_chunks = 5
        kind = anthropic.APIError if path == MESSAGES else openai.APIError
        with pytest.raises(kind, match="middle of the answer"):
            await _read_to_the_end(stage, path)


async def _read_to_the_end(stage: Stage, path: str) -> None:
    if path == RESPONSES:
        stream = await stage.client.responses.create(
            model=MODEL, input=QUESTION, stream=True
        )
        async for _ in stream:
            pass
        return
    said: Any = [{"role": "user", "content": QUESTION}]
    async with client_of(stage) as client:
        events = await client.messages.create(
            model=MODEL, max_tokens=30, messages=said, stream=True
        )
        async for _ in events:
            pass


async def test_responses_errors_are_numbered_on() -> None:
    """The error event of a stream goes on where the stream was."""
    async with staged() as stage:
        stage.cluster.decode[0].engine.faults.dies_after_chunks = 5
        body = {"model": MODEL, "input": QUESTION, "stream": True}
        answer = await stage.post(body, RESPONSES)
        last = answer.content.rstrip().split(b"\n\n")[-1]
        assert last.startswith(b"event: error\ndata: ")
        error = _data(last)
        assert (error["type"], error["code"]) == ("error", "engine_failed")
        assert error["sequence_number"] == 5


# --- what is wrong is said in the API's own shape


BAD: list[tuple[str, Any, int]] = [
    (RESPONSES, {"model": "no-such", "input": "x"}, 404),
    (RESPONSES, {"input": 7}, 400),
    (RESPONSES, {}, 400),
    (RESPONSES, {"input": "x", "max_output_tokens": "many"}, 400),
    (RESPONSES, {"input": "x", "stream": 7}, 400),
    (RESPONSES, {"input": "x", "tool_choice": 1}, 400),
    (RESPONSES, {"input": ["x"]}, 400),
    (RESPONSES, {"input": "x", "kv_transfer_params": {"remote_host": "h"}}, 400),
    (RESPONSES, {"input": "x", "ec_transfer_params": {}}, 400),
    (MESSAGES, {"model": "no-such", "messages": [], "max_tokens": 1}, 404),
    (MESSAGES, {}, 400),
    (MESSAGES, {"model": MODEL, "messages": [], "max_tokens": 0}, 400),
    (MESSAGES, {"model": MODEL, "messages": "x", "max_tokens": 5}, 400),
    (MESSAGES, {"model": MODEL, "messages": [{}], "max_tokens": 5}, 400),
    (MESSAGES, {"model": MODEL, "stop_sequences": 7}, 400),
    (MESSAGES, {"model": MODEL, "tool_choice": "any"}, 400),
    (MESSAGES, {"kv_transfer_params": {"do_remote_decode": True}}, 400),
    (MESSAGES, {"vllm_xargs": {"kv_transfer_params": "x"}}, 400),
    (GENERATE, {"token_ids": []}, 400),
    (GENERATE, {"token_ids": [1], "sampling_params": 7}, 400),
    (GENERATE, {"token_ids": [1], "sampling_params": {}, "stream": "x"}, 400),
    (
        GENERATE,
        {
            "token_ids": [1],
            "sampling_params": {"extra_args": {"kv_transfer_params": {}}},
        },
        400,
    ),
]


@pytest.mark.parametrize(("path", "body", "status"), BAD)
async def test_bad_input_is_a_typed_error(path: str, body: Any, status: int) -> None:
    """Never a 500: what is wrong is said, as the API's clients expect it."""
    async with staged() as stage:
        answer = await stage.post(body, path)
        assert answer.status_code == status, answer.text
        error = answer.json()
        if path == MESSAGES:
            assert error["type"] == "error"
            assert set(error["error"]) == {"type", "message"}
        else:
            assert set(error["error"]) == {"message", "type", "param", "code"}
        assert error["error"]["message"]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"{}x"])
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, GENERATE])
async def test_what_is_no_json_object_is_refused(path: str, raw: bytes) -> None:
    """A broken body is a 400 before any engine hears of it."""
    async with staged() as stage:
        answer = await stage.http.post(stage.router.url + path, content=raw)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        for server in stage.cluster.servers:
            assert not server.engine.received(path)


async def test_anthropics_client_raises_its_own_errors() -> None:
    """Wrong models, bad requests and a cluster that is down are told apart."""
    async with staged() as stage, client_of(stage) as client:
        said: Any = [{"role": "user", "content": "x"}]
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await client.messages.create(model="no", max_tokens=5, messages=said)
        with pytest.raises(anthropic.BadRequestError, match="X-Session-ID"):
            await client.messages.create(
                model=MODEL,
                max_tokens=5,
                messages=said,
                extra_headers={"X-Session-ID": "no spaces please"},
            )
        stage.cluster.decode[0].engine.faults.down = True
        with pytest.raises(anthropic.InternalServerError):
            await client.messages.create(model=MODEL, max_tokens=5, messages=said)


async def test_tokens_of_a_message_are_counted() -> None:
    """Anthropic's count comes from an engine."""
    async with staged() as stage, client_of(stage) as client:
        count = await client.messages.count_tokens(
            model=MODEL, system="kind", messages=[{"role": "user", "content": "hello"}]
        )
        assert count.input_tokens > 5


async def test_a_handle_of_another_form_in_the_header_is_refused() -> None:
    """What the router would not open is said, as for the body."""
    async with staged() as stage:
        body = {"model": MODEL, **BODIES["messages"][1]}
        answer = await stage.post(body, MESSAGES, **{HANDLE_HEADER: "mine"})
        assert answer.status_code == 400


async def test_a_client_that_leaves_stops_the_answer() -> None:
    """A client of Anthropic's that hangs up costs no engine any more work."""
    async with staged() as stage:
        gate = asyncio.Semaphore(3)
        decode = stage.cluster.decode[0].engine
        decode.faults.chunk_gate = gate
        body = {"model": MODEL, **BODIES["messages"][1], "stream": True}
        async with stage.http.stream(
            "POST", stage.router.url + MESSAGES, json=body, headers=CONVERSATION
        ) as answer:
            await anext(answer.aiter_bytes())
        await decode.changes.until(lambda: bool(decode.finished))
        assert decode.finished[-1].reason == "abort"


async def test_the_reason_is_named_where_decode_works_alone() -> None:
    """The plan header says so."""
    async with staged() as stage:
        body = {"model": MODEL, "input": "x", "truncation": "auto"}
        answer: httpx.Response = await stage.post(body, RESPONSES)
        assert _report(answer.headers).reason is Reason.DECODE_ALONE
