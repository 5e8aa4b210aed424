"""What docs/http.md says of fields and limits is what the code does."""

from __future__ import annotations

import re

import pytest

from api import body
from api.schemas import common, messages, unsupported
from api.schemas.chat import ChatRequest
from api.schemas.completions import CompletionRequest
from tests.helpers.source import ROOT

TEXT = (ROOT / "docs" / "http.md").read_text()
NAMED = set(re.findall(r"`([a-z_]+)`", TEXT))


@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest])
def test_every_field_is_documented(schema: type[ChatRequest]) -> None:
    assert set(schema.model_fields) <= NAMED


def test_every_refused_field_is_documented() -> None:
    assert set(unsupported.CHAT) | set(unsupported.COMPLETION) <= NAMED


@pytest.mark.parametrize(
    "said",
    [
        f"1 to {messages.MAX_MESSAGES};",
        f"at most {common.MAX_LOGIT_BIAS} |",
        f"1 to {common.MAX_SAMPLES}; prompts times n at most {common.MAX_CHOICES} |",
        f"up to {common.MAX_STOPS} strings of 1 to {common.MAX_STOP_LENGTH} characters",
        f"up to {common.MAX_STOP_TOKEN_IDS} ids",
        f"completions: 0 to {common.MAX_LOGPROBS}, the likeliest",
        f"with `logprobs` only: 0 to {common.MAX_LOGPROBS},",
        f"| `prompt_logprobs` | 0 to {common.MAX_LOGPROBS};",
        f"longer than {body._TIMEOUT_S:g} s",
    ],
)
def test_limits_are_as_documented(said: str) -> None:
    assert said in TEXT
