"""ChatKVLoom passes LangChain's standard suite, on fake engines.

What the suite would ask of a mind (to use the number of a question, the name in
it) a few lines do here; the rest is the wire, which is what the suite is about.
"""

import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest
from e2e.chat_model_suite import ChatModelSuite, Cluster
from e2e.served import served
from langchain_core.language_models import BaseChatModel
from langchain_tests.unit_tests import ChatModelUnitTests

from kvloom.langchain import ChatKVLoom
from kvloom.testing import Answer, Call, Context, respond


def attentive(context: Context) -> Answer:
    """Answers as the fake model does, with a question's own words in its calls."""
    answer = respond(context)
    question = context.text.rpartition("<|im_start|>user\n")[2].split("<|im_end|>")[0]
    keys = re.search("with '(.+?)' and '(.+?)' keys", question)
    if context.schema is not None and keys:
        return Answer(content=json.dumps(dict.fromkeys(keys.groups(), "because")))
    calls = tuple(
        Call(name=call.name, arguments=_from(question, call.arguments))
        for call in answer.tool_calls
    )
    return Answer(content=answer.content, tool_calls=calls)


def _from(question: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    number, quoted = re.search(r"\((\d+)\)", question), re.search("'(.+?)'", question)
    return {
        name: int(number[1])
        if number and isinstance(value, int)
        else quoted[1]
        if quoted and isinstance(value, str)
        else value
        for name, value in arguments.items()
    }


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
async def one_loop(anyio_backend: str) -> AsyncIterator[None]:
    """langchain-openai shares an asynchronous HTTP client among models."""
    yield  # noqa: PT022 - the loop lives for as long as this waits


@pytest.fixture(scope="module", params=["alone", "conversation"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Fake engines behind a router; with each call alone, or all in one
    conversation, whose histories have nothing to do with each other."""
    headers = {"X-Session-ID": "the-suite"} if request.param == "conversation" else {}
    with served(responder=attentive) as here:
        yield Cluster(here.base_url, here.model, headers)
        is_named = {turn.conversation for turn in here.turns()}
        # None at all where only tests were chosen that ask nothing.
        assert is_named <= {headers.get("X-Session-ID")}


@pytest.mark.anyio
class TestOnFakeEngines(ChatModelSuite):
    """Every test of the suite that needs no picture, sound or file."""


class TestUnit(ChatModelUnitTests):
    """Without any server."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatKVLoom

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "m", "base_url": "http://fake/v1", "api_key": "none"}

    @property
    def init_from_env_params(
        self,
    ) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        environment = {"OPENAI_API_KEY": "k", "OPENAI_API_BASE": "http://fake/v1"}
        expected = {"openai_api_key": "k", "openai_api_base": "http://fake/v1"}
        return environment, {"model": "m"}, expected
