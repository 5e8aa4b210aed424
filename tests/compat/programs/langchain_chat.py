"""LangChain's standard integration tests for chat models, on `ChatOpenAI`."""

from __future__ import annotations

import os
from typing import Any

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

MODEL = os.environ["COMPAT_MODEL"]


class TestMillstream(ChatModelIntegrationTests):
    """The whole suite; what is off here skips the tests that need it."""

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # Without a limit a model this small may go on to the end of its context.
        return {
            "model": MODEL,
            "base_url": os.environ["COMPAT_URL"] + "/v1",
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 64,
            "stream_usage": True,
        }

    @property
    def has_tool_calling(self) -> bool:
        return False  # the server has no tools yet

    @property
    def has_structured_output(self) -> bool:
        return False  # nor structured output

    @property
    def supports_json_mode(self) -> bool:
        return False

    @property
    def supports_image_inputs(self) -> bool:
        return False  # the model reads text only

    @property
    def model_override_value(self) -> str:
        return MODEL
