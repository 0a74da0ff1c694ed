"""ChatKVLoom passes LangChain's standard suite on a real pair, as far as a small
model does what it is asked."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from e2e.chat_model_suite import ChatModelSuite, Cluster
from shelf import Shelf

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
async def one_loop(anyio_backend: str) -> AsyncIterator[None]:
    """langchain-openai shares an asynchronous HTTP client among models."""
    yield  # noqa: PT022 - the loop lives for as long as this waits


@pytest.fixture
def cluster(shelf: Shelf) -> Cluster:
    running = shelf.up("--dev-endpoints")
    return Cluster(base_url=running.base_url, model=running.model)


class TestOnARealPair(ChatModelSuite):
    """The suite, with short answers: a small model may find no end."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "max_tokens": 100, "temperature": 0}
