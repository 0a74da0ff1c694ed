"""Other APIs than chat on a real pair: the same reuse, the same answers."""

import json
import uuid
from dataclasses import dataclass
from typing import Any

import anthropic
import pytest
from pair import Pair
from test_return_modes import routed, until_warm

from kvloom.protocol import HANDLE_HEADER, PLAN_HEADER, PlanReport, is_handle

SYSTEM = "You are a helpful assistant for a bank called Blue. " * 30
FIRST = "Who am I speaking with, and which bank is it?"
NEXT = "And which colour is it named after?"


both_ways = pytest.mark.parametrize(
    "is_streamed", [False, True], ids=["whole", "streamed"]
)


@dataclass(slots=True)
class Told:
    """One turn: what was said, what was reused, what the client carries."""

    text: str
    report: PlanReport
    handle: str | None


def told(text: str, header: str, handle: str | None) -> Told:
    report = PlanReport.decode_header(header)
    assert report is not None
    return Told(text, report, handle)


class Responses:
    """The Responses API, through OpenAI's client."""

    path = "/v1/responses"

    def body(self, pair: Pair, turns: list[str]) -> dict[str, Any]:
        roles = ("user", "assistant")
        given = [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]
        return {
            "model": pair.model,
            "instructions": SYSTEM,
            "input": given,
            "temperature": 0,
            "max_output_tokens": 24,
        }

    def ask(
        self, pair: Pair, turns: list[str], *, is_streamed: bool, name: str
    ) -> Told:
        raw = pair.client.responses.with_raw_response.create(
            **self.body(pair, turns),
            stream=is_streamed,
            extra_headers={"X-Session-ID": name},
        )
        answer: Any = raw.parse()
        if is_streamed:
            events = list(answer)
            assert events[-1].type == "response.completed"
            answer = events[-1].response
        params = (answer.model_extra or {}).get("kv_transfer_params") or {}
        return told(answer.output_text, raw.headers[PLAN_HEADER], params.get("kvloom"))

    def text_of(self, answer: dict[str, Any]) -> str:
        items = [item for item in answer["output"] if item["type"] == "message"]
        return "".join(part["text"] for item in items for part in item["content"])


class Messages:
    """The Messages API, through Anthropic's client."""

    path = "/v1/messages"

    def body(self, pair: Pair, turns: list[str]) -> dict[str, Any]:
        roles = ("user", "assistant")
        said = [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]
        return {
            "model": pair.model,
            "system": SYSTEM,
            "messages": said,
            "max_tokens": 24,
            "temperature": 0,
        }

    def ask(
        self, pair: Pair, turns: list[str], *, is_streamed: bool, name: str
    ) -> Told:
        body = self.body(pair, turns)
        # Clients of other releases have no such argument any more.
        body["extra_body"] = {"temperature": body.pop("temperature")}
        headers = {"X-Session-ID": name}
        url = pair.running.base_url.removesuffix("/v1")
        with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as client:
            if not is_streamed:
                raw = client.messages.with_raw_response.create(
                    **body, extra_headers=headers
                )
                message, got = raw.parse(), raw.headers
            else:
                with client.messages.stream(**body, extra_headers=headers) as stream:
                    message = stream.get_final_message()
                    got = stream.response.headers
        text = "".join(block.text for block in message.content if block.type == "text")
        return told(text, got[PLAN_HEADER], got.get(HANDLE_HEADER))

    def text_of(self, answer: dict[str, Any]) -> str:
        return "".join(b["text"] for b in answer["content"] if b["type"] == "text")


def oracle(api: Any, pair: Pair, turns: list[str]) -> str:
    """What a fresh single engine says."""
    body = api.body(pair, turns) | {"cache_salt": uuid.uuid4().hex}
    answer = pair.http.post(pair.prefill + api.path, json=body)
    answer.raise_for_status()
    text: str = api.text_of(answer.json())
    return text


@both_ways
@pytest.mark.parametrize(
    "api", [Responses(), Messages()], ids=["responses", "messages"]
)
def test_the_second_turn_starts_from_the_cache(
    pair: Pair, api: Any, is_streamed: bool
) -> None:
    """Prefill lost its cache, and the history comes back from decode; the
    answers are a fresh engine's, and the client has a handle."""
    name = uuid.uuid4().hex
    first = api.ask(pair, [FIRST], is_streamed=is_streamed, name=name)
    assert first.text == oracle(api, pair, [FIRST])
    assert first.handle is not None
    assert is_handle(first.handle)
    pair.forget()
    turns = [FIRST, first.text, NEXT]
    second = api.ask(pair, turns, is_streamed=is_streamed, name=name)
    assert second.report.plan == "return", second.report
    assert second.report.returned_tokens is not None
    assert first.report.prompt_tokens is not None
    # All of the last prompt, but for the block that the answer begins in.
    assert second.report.returned_tokens >= first.report.prompt_tokens - 16
    assert second.text == oracle(api, pair, turns)


ACCOUNT = {
    "type": "object",
    "properties": {"account": {"enum": ["blue", "green", "red"]}},
    "required": ["account"],
    "additionalProperties": False,
}
CALLING: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "tools": [{"name": "limit", "input_schema": ACCOUNT}],
        "tool_choice": {"type": "any"},
        "max_tokens": 100,
    },
    "/v1/responses": {
        "tools": [{"type": "function", "name": "limit", "parameters": ACCOUNT}],
        "tool_choice": "required",
        "max_output_tokens": 100,
    },
}


def after_the_call(
    api: Any, body: dict[str, Any], answer: dict[str, Any]
) -> dict[str, Any]:
    """The next request, with the tool's result."""
    said = "It is 500. " * 20
    if isinstance(api, Messages):
        call = next(b for b in answer["content"] if b["type"] == "tool_use")
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": said}
        called = {"role": "assistant", "content": answer["content"]}
        after = [called, {"role": "user", "content": [result]}]
        return body | {"messages": [*body["messages"], *after]}
    call = next(i for i in answer["output"] if i["type"] == "function_call")
    result = {
        "type": "function_call_output",
        "call_id": call["call_id"],
        "output": said,
    }
    return body | {"input": [*body["input"], call, result]}


def calls_in(api: Any, answer: dict[str, Any]) -> list[Any]:
    """The calls of an answer, without names that are new each time."""
    if isinstance(api, Messages):
        return [b["input"] for b in answer["content"] if b["type"] == "tool_use"]
    return [i["arguments"] for i in answer["output"] if i["type"] == "function_call"]


@pytest.mark.parametrize(
    "api", [Responses(), Messages()], ids=["responses", "messages"]
)
def test_prefill_is_warm_when_the_tool_is_done(pair: Pair, api: Any) -> None:
    """Mode eager for the agents of OpenAI and Anthropic too: prompt and answer go
    back to prefill in tokens, and the next turn finds all of it there."""
    name = {"X-Session-ID": uuid.uuid4().hex}
    with routed(pair, returns="eager", direct_tokens=0) as router:
        url = router.running.url + api.path
        body = api.body(router, [FIRST]) | CALLING[api.path]
        first = router.http.post(url, json=body, headers=name).raise_for_status()
        until_warm(router)
        body = after_the_call(api, body, first.json())
        second = router.http.post(url, json=body, headers=name).raise_for_status()
        reports = [
            PlanReport.decode_header(answer.headers[PLAN_HEADER])
            for answer in (first, second)
        ]
        fresh = body | {"cache_salt": uuid.uuid4().hex}
        truth = router.http.post(router.prefill + api.path, json=fresh)
        assert reports[0] is not None
        assert reports[1] is not None
        assert reports[1].reason == "warm"
        # All of it, but for the block that the tool's result begins in.
        assert reports[1].local_tokens is not None
        assert reports[1].local_tokens > (reports[0].prompt_tokens or 0) - 32
        assert calls_in(api, second.json()) == calls_in(api, truth.json())
        assert calls_in(api, second.json())


@both_ways
def test_tokens_in_tokens_out_starts_from_the_cache(
    pair: Pair, is_streamed: bool
) -> None:
    """vLLM's own API for those who keep the tokens themselves."""
    name, ids = uuid.uuid4().hex, list(range(1000, 1400))
    for number in range(2):
        body = {
            "token_ids": ids,
            "sampling_params": {"max_tokens": 20, "temperature": 0, "ignore_eos": True},
        }
        salted = body | {"cache_salt": uuid.uuid4().hex}
        fresh = pair.http.post(f"{pair.prefill}/inference/v1/generate", json=salted)
        expected = fresh.json()["choices"][0]["token_ids"]
        pair.forget()
        answer = pair.http.post(
            pair.running.base_url.removesuffix("/v1") + "/inference/v1/generate",
            json=body | {"stream": is_streamed},
            headers={"X-Session-ID": name},
        )
        report = PlanReport.decode_header(answer.headers[PLAN_HEADER])
        assert report is not None
        said = _tokens(answer.text, is_streamed=is_streamed)
        assert said == expected
        if number:
            assert report.returned_tokens is not None
            assert report.returned_tokens >= 400
        ids = [*ids, *said, *range(2000, 2040)]


def _tokens(text: str, *, is_streamed: bool) -> list[int]:
    if not is_streamed:
        ids: list[int] = json.loads(text)["choices"][0]["token_ids"]
        return ids
    lines = [x.removeprefix("data: ") for x in text.split("\n\n") if x]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    return [t for c in chunks for x in c["choices"] for t in x["token_ids"]]


def test_a_client_that_names_nothing_starts_from_the_cache(pair: Pair) -> None:
    """No header, no session: the history itself is recognised."""
    word = uuid.uuid4().hex
    history = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{FIRST} My word is {word}."},
    ]
    first = pair.ask(history)
    pair.forget()
    longer = [
        *history,
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": NEXT},
    ]
    second = pair.ask(longer)
    assert second.plan.plan == "return", second.plan
    assert second.plan.returned_tokens
    assert second.token_ids == pair.oracle(longer)


def test_what_is_no_turn_passes_through(pair: Pair) -> None:
    """Tokens there and back, the version, and no switch of an engine's."""
    url = pair.running.base_url.removesuffix("/v1")
    made = pair.http.post(f"{url}/tokenize", json={"prompt": "hello there"})
    tokens = {"tokens": made.json()["tokens"]}
    back = pair.http.post(f"{url}/detokenize", json=tokens)
    assert back.json()["prompt"].strip() == "hello there"
    assert pair.http.get(f"{url}/version").json()["version"]
    assert pair.http.post(f"{url}/reset_prefix_cache").status_code == 404
