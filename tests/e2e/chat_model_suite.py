"""LangChain's standard suite of chat models, on ChatKVLoom and any cluster.

A subclass names the cluster with its fixture ``cluster``: fake engines in
``test_sdk_standard.py``; a real pair wherever one is at hand.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests

from kvloom.langchain import ChatKVLoom


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where the suite's model is served."""

    base_url: str
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with every call."""


class ChatModelSuite(ChatModelIntegrationTests):
    """The suite; what needs eyes and ears is left out by its own switches."""

    where: Cluster

    @pytest.fixture(autouse=True)
    def _on(self, cluster: Cluster) -> None:
        self.where = cluster

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatKVLoom

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": self.where.model,
            "base_url": self.where.base_url,
            "api_key": "none",
            "default_headers": self.where.headers,
        }

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return self.where.model

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        """The same question twice: the second finds the first one's cache."""
        model = self.chat_model_class(**self.chat_model_params, streaming=stream)
        question = "Tell me what you know of rivers. " * 20
        model.invoke(question)
        answer = model.invoke(question)
        assert isinstance(answer, AIMessage)
        return answer
