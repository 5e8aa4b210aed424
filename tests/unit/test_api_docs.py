"""What docs/api.md says of endpoints, fields and limits is what the code does."""

from __future__ import annotations

import pytest

from api.schemas import common, messages, unsupported
from api.schemas.chat import ChatRequest
from api.schemas.completions import CompletionRequest
from cli import surface
from tests.helpers.source import ROOT

TEXT = (ROOT / "docs" / "api.md").read_text()
ODD_VALUES = ["x", 7, True, [1], {"a": "b"}]


def test_the_page_is_up_to_date() -> None:
    assert surface.page() == TEXT, "make the page again: python -m cli.surface"


@pytest.mark.parametrize(
    "said",
    [
        f"list (1 to {messages.MAX_MESSAGES} items) of object; required",
        f"; at most {common.MAX_LOGIT_BIAS} of them",
        f"| integer 1 to {common.MAX_SAMPLES} |",
        f"prompts times `n` are at most {common.MAX_CHOICES}.",
        f"Up to {common.MAX_STOPS} strings of 1 to {common.MAX_STOP_LENGTH} characters",
        f"list (up to {common.MAX_STOP_TOKEN_IDS} items) of integer from 0",
    ],
)
def test_limits_are_as_documented(said: str) -> None:
    assert said in TEXT


@pytest.mark.parametrize("value", ODD_VALUES)
@pytest.mark.parametrize("name", [name for name in unsupported.IGNORED if "." not in name])
def test_what_is_said_to_be_ignored_is_ignored(name: str, value: object) -> None:
    plain = ChatRequest.parse({"model": "m", "messages": [{"role": "user", "content": "x"}]})
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], name: value}
    assert ChatRequest.parse(body) == plain
    assert CompletionRequest.parse({"model": "m", "prompt": "x", name: value}).model_fields_set == {
        "model",
        "prompt",
    }


def test_ignored_options_of_streams_are_ignored() -> None:
    options = {name.partition(".")[2]: True for name in unsupported.IGNORED if name.startswith("stream_")}
    body = {"model": "m", "prompt": "x", "stream": True, "stream_options": options}
    parsed = CompletionRequest.parse(body)
    assert parsed.stream_options == common.StreamOptions()


@pytest.mark.parametrize(
    ("schema", "refused"),
    [(ChatRequest, unsupported.CHAT), (CompletionRequest, unsupported.COMPLETION)],
)
def test_a_field_has_one_state(schema: type[ChatRequest], refused: dict[str, object]) -> None:
    assert not set(schema.model_fields) & set(refused)
    assert not set(unsupported.IGNORED) & (set(schema.model_fields) | set(refused))
