"""What is added to stock engines, held against the installed vLLM."""

import inspect
import json
import os
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

METHOD = "chat_completion_stream_generator"
SERVING = "vllm.entrypoints.openai.chat_completion.serving"
HANDLE = {"remote_request_id": "r", "remote_num_tokens": 40}


def imported(name: str) -> Any:
    """A module of vLLM's, whose imports warn about each other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(name)


@pytest.fixture(scope="module")
def stock() -> Any:
    """The module under test, as an engine loads it."""
    pytest.importorskip("vllm", reason="the engine is not installed")
    return imported("kvloom_server.bench.stock_engine")


@pytest.fixture(scope="module")
def serving(stock: Any) -> Any:
    """vLLM's own class that answers chats."""
    return imported(SERVING).OpenAIServingChat


Streaming = Callable[..., Awaitable[list[str]]]


async def results(*handles: dict[str, Any] | None) -> AsyncIterator[Any]:
    for handle in handles:
        yield SimpleNamespace(request_id="r", kv_transfer_params=handle)


@pytest.fixture
def streaming(stock: Any, serving: Any, monkeypatch: pytest.MonkeyPatch) -> Streaming:
    """What a client gets of an engine with the middleware, which writes an event a
    result: vLLM's method is a plain one for the time."""

    async def plain(_self: Any, request: Any, found: Any) -> AsyncIterator[str]:
        assert request == "request"
        async for result in found:
            yield f"data: {result.request_id}\n\n"
        yield "data: [DONE]\n\n"

    monkeypatch.setattr(serving, METHOD, plain)
    stock.HandlesInStreams(None)

    async def streamed(*handles: dict[str, Any] | None) -> list[str]:
        stream = getattr(serving, METHOD)
        return [event async for event in stream(None, "request", results(*handles))]

    return streamed


@pytest.mark.anyio
async def test_a_streamed_answer_ends_with_its_handle(streaming: Streaming) -> None:
    """After all that vLLM says, before the end; the last result has it."""
    first, second, handle, done = await streaming(None, HANDLE)
    assert first == second == "data: r\n\n"
    assert done == "data: [DONE]\n\n"
    chunk = json.loads(handle.removeprefix("data: "))
    assert (chunk["choices"], chunk["kv_transfer_params"]) == ([], HANDLE)


@pytest.mark.anyio
async def test_a_turn_without_a_handle_is_streamed_as_it_is(
    streaming: Streaming,
) -> None:
    """Prefill's legs, and turns that decode keeps nothing of."""
    assert await streaming(None, None) == ["data: r\n\n"] * 2 + ["data: [DONE]\n\n"]
    assert await streaming() == ["data: [DONE]\n\n"]


def test_vllm_streams_chats_where_it_is_extended(serving: Any) -> None:
    """One method, which takes the request and its results first."""
    method = getattr(serving, METHOD)
    assert inspect.isasyncgenfunction(method)
    assert list(inspect.signature(method).parameters)[:3] == [
        "self",
        "request",
        "result_generator",
    ]


def test_the_model_keeps_its_core(stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a worker does to itself while it is made."""
    before = os.sched_getaffinity(0)
    core = min(before)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", str(core))
    try:
        with stock._own_cores():
            os.sched_setaffinity(0, {max(before)})
        assert os.sched_getaffinity(0) == {core}
    finally:
        os.sched_setaffinity(0, before)


def test_nixl_agents_pause_while_they_poll(
    stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The binding's constructor gets the pause, and is as before afterwards."""
    wrapper = imported("vllm.distributed.nixl_utils").NixlWrapper
    if wrapper is None:
        pytest.skip("NIXL is not installed")
    bindings = imported(wrapper.__module__).nixlBind
    made: list[Any] = []
    monkeypatch.setattr(
        bindings, "nixlAgent", lambda _name, config: made.append(config)
    )
    plain = bindings.nixlAgent
    with stock._patient_agents():
        bindings.nixlAgent("a", SimpleNamespace(pthrDelay=0))
    assert made[0].pthrDelay == stock.PROGRESS_DELAY_US
    assert bindings.nixlAgent is plain
