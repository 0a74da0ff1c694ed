"""What ``kvloom bench reuse`` adds to vLLM's own engines, so that they do their best.

Loaded by the engines of *stock* and *rival*, never by kvloom. Their connector, its
handles and its reads stay vLLM's own; three things are given to them that have
nothing to do with reuse, or without which there would be none. On CPU:

- NIXL's progress thread pauses between polls, as in kvloom's engines. As it comes it
  takes a whole core for itself: on a host with few, the one that the model computes on.
- the model keeps the core that it was given, where vLLM's worker moves it to the
  machine's last one, which all engines would share.

And everywhere:

- a streamed answer carries the turn's handle. vLLM 0.32 puts it into plain answers
  only (vllm#36308; vllm#40186 is open), so that no streamed turn would return anything.
"""

import importlib
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlPullConnector,
)
from vllm.platforms import current_platform

PROGRESS_DELAY_US: Final = 1000
_DONE: Final = "data: [DONE]\n\n"


class NixlConnector(NixlPullConnector):
    """vLLM's own; on CPU, on the core that its engine was given."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with ExitStack() as stack:
            if str(current_platform.device_type) == "cpu":
                stack.enter_context(_patient_agents())
                stack.enter_context(_own_cores())
            super().__init__(vllm_config, role, kv_cache_config)


@contextmanager
def _own_cores() -> Iterator[None]:
    cores = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "")
    bound = {int(core) for core in cores.split(",") if core.isdigit()}
    before = bound or os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _patient_agents() -> Iterator[None]:
    """NIXL's Python API sets no pause, so its binding is wrapped meanwhile."""
    from vllm.distributed.nixl_utils import NixlWrapper

    if NixlWrapper is None:
        yield
        return
    bindings = importlib.import_module(NixlWrapper.__module__).nixlBind
    make_agent = bindings.nixlAgent

    def make_patient_agent(name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_DELAY_US
        return make_agent(name, config)

    bindings.nixlAgent = make_patient_agent
    try:
        yield
    finally:
        bindings.nixlAgent = make_agent


class HandlesInStreams:
    """For ``--middleware``: streamed chat answers end with the turn's handle.

    It lets every request through as it is; being made, it extends the one method of
    vLLM's that writes the streams of chat completions.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        _extend_streams()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)


def _extend_streams() -> None:
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    stream = OpenAIServingChat.chat_completion_stream_generator

    async def with_handle(
        self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[str]:
        last: list[Any] = []
        results = _noted(result_generator, last)
        async for event in stream(self, request, results, *args, **kwargs):
            if event == _DONE and last and last[0].kv_transfer_params:
                yield _handle_event(last[0])
            yield event

    OpenAIServingChat.chat_completion_stream_generator = with_handle


async def _noted(results: Any, last: list[Any]) -> AsyncIterator[Any]:
    """The same results; the newest one is in ``last``."""
    async for result in results:
        last[:] = [result]
        yield result


def _handle_event(result: Any) -> str:
    """One more chunk: it has no choice, and the handle."""
    chunk = {
        "id": result.request_id,
        "object": "chat.completion.chunk",
        "created": 0,
        "model": "",
        "choices": [],
        "kv_transfer_params": result.kv_transfer_params,
    }
    return f"data: {msgspec.json.encode(chunk).decode()}\n\n"
