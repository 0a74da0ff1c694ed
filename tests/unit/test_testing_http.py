"""The fake's HTTP surface is vLLM's, as the official client sees it."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from kvloom.protocol import prefill_params
from kvloom.testing import (
    Answer,
    Call,
    FakeCluster,
    FakeEngine,
    decode,
    encode,
    render_chat,
    thoughtful,
)

pytestmark = pytest.mark.anyio
MODEL = "fake-model"
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {
            "type": "object",
            "properties": {"to": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["to"],
        },
    },
}
NAMED = {"type": "function", "function": {"name": "book"}}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine("decode", loras=("adapter",)) as engine:
        yield engine
        engine.check_integrity()
        assert engine.pool.num_held == 0


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(engine.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
        yield client


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The decoded events of a stream, which has to end with ``[DONE]``."""
    *chunks, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


async def chat(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": HELLO, **fields}
    return await client.post("/v1/chat/completions", json=body)


async def test_the_official_client_gets_a_tool_loop() -> None:
    """A tool call, its result, an answer: plain and streamed are the same."""
    async with FakeCluster(prefill=0, decode=1) as cluster:
        url = cluster.decode[0].url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="-") as client:
            ask: Any = {"model": MODEL, "messages": HELLO, "tools": [TOOL]}
            plain = await client.chat.completions.create(**ask)
            call = plain.choices[0].message.tool_calls[0]
            assert plain.choices[0].finish_reason == "tool_calls"
            assert json.loads(call.function.arguments)["to"] in ("Paris", "Rome")
            async with client.chat.completions.stream(**ask) as stream:
                final = await stream.get_final_completion()
            assert final.choices[0].message.tool_calls[0].id == call.id
            reply = plain.choices[0].message.model_dump(exclude_none=True)
            result = {"role": "tool", "tool_call_id": call.id, "content": "booked"}
            ask["messages"] = [*HELLO, reply, result]
            last = await client.chat.completions.create(**ask)
            assert last.choices[0].finish_reason == "stop"
            assert last.choices[0].message.content
            assert last.usage.prompt_tokens_details.cached_tokens > 0


async def test_the_official_client_raises_its_usual_errors() -> None:
    """Error bodies have the shape that the client understands."""
    async with FakeCluster(prefill=0, decode=1) as cluster:
        server = cluster.decode[0]
        async with openai.AsyncOpenAI(
            base_url=server.url + "/v1", api_key="-", max_retries=0
        ) as client:
            ask: Any = {"model": MODEL, "messages": HELLO}
            with pytest.raises(openai.NotFoundError) as caught:
                await client.chat.completions.create(**{**ask, "model": "other"})
            assert caught.value.body["message"].startswith("The model `other`")
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(**ask, max_tokens=0)
            server.engine.fail_next(status=500)
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(**ask)
            assert (await client.chat.completions.create(**ask)).choices


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL]}, {"n": 2}])
@pytest.mark.parametrize("responder", ["plain", "thoughtful"])
async def test_a_stream_adds_up_to_the_plain_answer(
    fields: dict[str, Any], responder: str
) -> None:
    """Content, reasoning and tool calls arrive whole, whichever way."""
    options: Any = {"responder": thoughtful} if responder == "thoughtful" else {}
    engine = FakeEngine("decode", **options)
    transport = httpx.ASGITransport(engine.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
        plain = (await chat(client, **fields)).json()
        chunks = events(await chat(client, stream=True, **fields))
    for choice in plain["choices"]:
        mine = [
            entry
            for chunk in chunks
            for entry in chunk["choices"]
            if entry["index"] == choice["index"]
        ]
        deltas = [entry["delta"] for entry in mine]
        message = choice["message"]
        assert deltas[0] == {"role": "assistant", "content": ""}
        for key in ("content", "reasoning"):
            text = "".join(delta.get(key) or "" for delta in deltas)
            assert text == (message[key] or "")
        parts = [call for delta in deltas for call in delta.get("tool_calls", ())]
        arguments = "".join(part["function"]["arguments"] for part in parts)
        calls = message.get("tool_calls", ())
        assert arguments == "".join(c["function"]["arguments"] for c in calls)
        assert [e["finish_reason"] for e in mine if e["finish_reason"]] == [
            choice["finish_reason"]
        ]


async def test_a_stream_has_usage_only_when_asked(client: httpx.AsyncClient) -> None:
    """The usage chunk comes last, without choices."""
    without = events(await chat(client, stream=True))
    assert not any("usage" in chunk for chunk in without)
    options = {"include_usage": True}
    *_, last = events(await chat(client, stream=True, stream_options=options))
    assert last["choices"] == []
    plain = (await chat(client)).json()["usage"]
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][key] == plain[key]
    options["continuous_usage_stats"] = True
    all_of_them = events(await chat(client, stream=True, stream_options=options))
    assert all("usage" in chunk for chunk in all_of_them)


async def test_token_ids_are_the_model_s_own(client: httpx.AsyncClient) -> None:
    """``return_token_ids`` gives the prompt's ids once and each token's."""
    plain = (await chat(client, return_token_ids=True)).json()
    assert plain["prompt_token_ids"] == encode(render_chat({"messages": HELLO}))
    choice = plain["choices"][0]
    assert decode(choice["token_ids"]) == choice["message"]["content"] + "<|im_end|>"
    assert len(choice["token_ids"]) == plain["usage"]["completion_tokens"]
    chunks = events(await chat(client, return_token_ids=True, stream=True))
    assert chunks[0]["prompt_token_ids"] == plain["prompt_token_ids"]
    streamed = [t for c in chunks[1:] for t in c["choices"][0]["token_ids"]]
    assert streamed == choice["token_ids"]


async def test_given_token_ids_win_over_the_messages(
    client: httpx.AsyncClient,
) -> None:
    """``kv_transfer_params.prompt_token_ids`` is the prompt, as in vLLM."""
    params = {"prompt_token_ids": [300, 301, 302]}
    answer = await chat(client, kv_transfer_params=params)
    assert answer.json()["usage"]["prompt_tokens"] == 3


async def test_logprobs_come_for_each_token(client: httpx.AsyncClient) -> None:
    """Chat and completions have their own forms."""
    plain = (await chat(client, logprobs=True, top_logprobs=3)).json()
    content = plain["choices"][0]["logprobs"]["content"]
    assert len(content) == plain["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert content[0]["top_logprobs"][0]["token"] == content[0]["token"]
    body = {"model": MODEL, "prompt": "hello\n", "logprobs": 2}
    answer = (await client.post("/v1/completions", json=body)).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == 16


async def test_completions_take_text_ids_and_lists(client: httpx.AsyncClient) -> None:
    """A prompt may be text, token ids, or several of either."""

    async def texts(prompt: Any, **fields: Any) -> dict[int, str]:
        body = {"model": MODEL, "prompt": prompt, **fields}
        response = await client.post("/v1/completions", json=body)
        answers = events(response) if fields.get("stream") else [response.json()]
        merged: dict[int, str] = {}
        for choice in (c for answer in answers for c in answer["choices"]):
            merged[choice["index"]] = merged.get(choice["index"], "") + choice["text"]
        return merged

    one = await texts("hello\n")
    assert await texts(encode("hello\n")) == one
    both = await texts(["hello\n", "other\n"])
    assert both == {0: one[0], 1: (await texts("other\n"))[0]}
    assert await texts([encode("hello\n"), encode("other\n")]) == both
    assert await texts(["hello\n", "other\n"], stream=True) == both
    assert (await texts("hello\n", n=2)).keys() == {0, 1}
    assert await texts("hello\n", echo=True) == {0: "hello\n" + one[0]}


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), (NAMED, "stop"), ("auto", "tool_calls")],
)
async def test_a_tool_choice_is_kept(
    client: httpx.AsyncClient, choice: Any, reason: str
) -> None:
    """Forced and named tools are called; each ends as vLLM ends it."""
    answer = (await chat(client, tools=[TOOL], tool_choice=choice)).json()["choices"][0]
    assert answer["finish_reason"] == reason
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "book"


async def test_no_tool_is_called_under_none(client: httpx.AsyncClient) -> None:
    """``tool_choice="none"`` keeps the tools in the prompt and answers in words."""
    none = (await chat(client, tools=[TOOL], tool_choice="none")).json()
    auto = (await chat(client, tools=[TOOL], tool_choice="auto")).json()
    assert none["usage"]["prompt_tokens"] == auto["usage"]["prompt_tokens"]
    assert none["choices"][0]["message"]["content"]


async def test_a_script_can_answer() -> None:
    """A responder of the test's own plays the agent's turns."""
    engine = FakeEngine(
        "decode",
        responder=lambda context: Answer(
            content=f"{context.last_role} said it",
            tool_calls=(Call(name="book", arguments={"to": "Rome"}),),
        ),
    )
    transport = httpx.ASGITransport(engine.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
        message = (await chat(client)).json()["choices"][0]["message"]
    assert message["content"] == "user said it"
    assert message["tool_calls"][0]["function"]["arguments"] == '{"to": "Rome"}'


REFUSED: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "other"}, 404, "model"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"min_tokens": 2, "max_tokens": 1}, 400, None),
    ({"min_tokens": 2, "max_completion_tokens": 1, "max_tokens": 9}, 400, None),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": "many"}, 400, "body.max_tokens"),
    ({"max_tokens": 100_000}, 400, "max_tokens"),
    ({"top_logprobs": 2}, 400, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 99}, 400, "logprobs"),
    ({"stream": True, "prompt_logprobs": 1}, 400, "prompt_logprobs"),
    ({"temperature": 0, "n": 2}, 400, None),
    ({"temperature": 3}, 400, "temperature"),
    ({"tools": []}, 400, "tools"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, 400, "tool_choice"),
    (
        {
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "x"}},
        },
        400,
        "tool_choice",
    ),
    ({"cache_salt": ""}, 400, "cache_salt"),
    ({"cache_salt": "a/b"}, 400, "cache_salt"),
    ({"stop": [""]}, 400, None),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        400,
        None,
    ),
    ({"messages": None}, 400, "body.messages"),
    ({"messages": [{"content": "x"}]}, 400, "body.messages.0.role"),
    (
        {"messages": [{"role": "user", "content": "word " * 9_000}]},
        400,
        "input_tokens",
    ),
    ({"tools": [TOOL], "tool_choice": "required", "max_tokens": 1}, 500, None),
    ({"tools": [TOOL], "tool_choice": NAMED, "max_tokens": 1}, 500, None),
]


@pytest.mark.parametrize(("fields", "status", "param"), REFUSED)
async def test_what_vllm_refuses_is_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], status: int, param: str | None
) -> None:
    """Whatever a prefill leg could trip over fails here as it fails there."""
    response = await chat(client, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, status)
    assert error["param"] == param
    assert error["message"]
    assert error["type"]


async def test_max_completion_tokens_wins(client: httpx.AsyncClient) -> None:
    """A prefill leg that keeps it generates more than its one token."""
    answer = await chat(client, max_tokens=1, max_completion_tokens=5)
    assert answer.json()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("content", [b"{", b"", b"[]", b'"text"'])
async def test_malformed_bodies_are_400(
    client: httpx.AsyncClient, content: bytes
) -> None:
    """What is no JSON object is refused with an error body."""
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        response = await client.post(path, content=content)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == 400


async def test_paths_and_methods_that_are_not_there(client: httpx.AsyncClient) -> None:
    """Even these have an error body."""
    response = await client.get("/v1/nothing")
    assert (response.status_code, response.json()["error"]["code"]) == (404, 404)
    response = await client.get("/v1/chat/completions")
    assert (response.status_code, response.json()["error"]["code"]) == (405, 405)


async def test_the_small_endpoints(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """Models, health, metrics, tokenize and reset answer as vLLM's do."""
    assert (await client.get("/health")).status_code == 200
    models = (await client.get("/v1/models")).json()["data"]
    assert [(m["id"], m["parent"]) for m in models] == [
        (MODEL, None),
        ("adapter", MODEL),
    ]
    body = {"model": MODEL, "messages": HELLO, "tools": [TOOL]}
    tokens = (await client.post("/tokenize", json=body)).json()
    assert tokens["tokens"] == encode(render_chat(body))
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 8192)
    back = await client.post("/detokenize", json={"tokens": tokens["tokens"]})
    assert back.json() == {"prompt": render_chat(body)}
    await chat(client)
    metrics = (await client.get("/metrics")).text
    label = f'engine="0",model_name="{MODEL}"'
    assert f"vllm:num_requests_running{{{label}}} 0" in metrics
    done = f'vllm:request_success_total{{{label},finished_reason="stop"}} 1'
    assert done in metrics
    assert (await client.post("/reset_prefix_cache")).json() == {"success": True}


async def test_a_reset_fails_while_blocks_are_held() -> None:
    """A prompt that waits for decode keeps the cache from being reset."""
    async with FakeEngine("prefill") as engine:
        transport = httpx.ASGITransport(engine.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://e"
        ) as client:
            await chat(client, max_tokens=1, kv_transfer_params=prefill_params(None))
            reset = await client.post("/reset_prefix_cache")
            assert reset.json() == {"success": False}


async def test_a_handover_says_what_vllm_s_says() -> None:
    """A prefill leg's answer has vLLM's keys and the outcome beside them."""
    params = prefill_params(None)
    async with FakeEngine("prefill") as engine:
        engine_id = engine.engine_id
        transport = httpx.ASGITransport(engine.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://e"
        ) as prefill:
            answer = (
                await chat(prefill, max_tokens=1, kv_transfer_params=params)
            ).json()
    handover = answer["kv_transfer_params"]
    num_tokens = answer["usage"]["prompt_tokens"]
    assert handover["do_remote_prefill"] is True
    assert handover["do_remote_decode"] is False
    assert handover["remote_num_tokens"] == num_tokens
    assert len(handover["remote_block_ids"][0]) == -(-num_tokens // 16)
    assert handover["remote_engine_id"] == engine_id
    assert handover["kvloom"] == {
        "local_tokens": 0,
        "returned_tokens": 0,
        "why": None,
    }


async def test_every_request_is_recorded(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """Tests can look at what an engine was really sent."""
    await client.get("/health")
    await client.post(
        "/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "r1"}
    )
    health, completion = engine.requests
    assert (health.method, health.path, health.body) == ("GET", "/health", None)
    assert completion.headers["x-request-id"] == "r1"
    assert completion.body == {"prompt": "x"}
    assert [turn.request_id for turn in engine.finished] == ["cmpl-r1"]
