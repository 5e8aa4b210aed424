"""What clients say of themselves, and the rules of the house: what becomes of it on the bus."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from pydantic import ValidationError

from api.errors import from_validation
from api.house import House
from api.schemas.chat import ChatRequest
from api.schemas.completions import CompletionRequest
from common.bus.registry import ModelInfo
from common.errors import InvalidRequestError
from common.messages import Request
from common.settings import Command, Settings, resolve

MODEL = ModelInfo("m", max_model_len=100, vocab_size=50, created=1)
USER = [{"role": "user", "content": "hi"}]


def house(**flags: Any) -> House:
    return House(resolve(Command.API, flags, {}))


def chat(rules: House | None = None, label: str = "", **fields: Any) -> Request:
    ask = ChatRequest.parse({"model": "m", "messages": USER} | fields)
    return (rules or House(Settings())).dress(ask.to_request(MODEL), ask, label)


def complete(rules: House | None = None, **fields: Any) -> Request:
    ask = CompletionRequest.parse({"model": "m", "prompt": "hi", **fields})
    return (rules or House(Settings())).dress(ask.to_request(MODEL), ask, "")


def refused(name: str, value: Any) -> None:
    for schema, body in ((ChatRequest, {"messages": USER}), (CompletionRequest, {"prompt": "hi"})):
        with pytest.raises(ValidationError) as caught:
            schema.parse({"model": "m", **body, name: value})  # type: ignore[attr-defined]
        assert from_validation(caught.value).param == name


def stored(request: Request) -> Request:
    """The request as another process reads it."""
    fields = {name.encode(): str(value).encode() for name, value in request.to_fields().items()}
    return Request.from_fields(request.uid, fields)


def test_priority() -> None:
    assert chat().priority == chat(priority=None).priority == 0
    assert stored(chat(priority=-100)).priority == -100
    assert complete(priority=100).priority == 100
    for wrong in (-101, 101, 1.5, "1", True):
        refused("priority", wrong)


def test_priority_does_not_change_the_class() -> None:
    assert chat(priority=-100, service_tier="flex").cls == "batch"
    assert chat(priority=100).cls == "interactive"


def test_cache_salt() -> None:
    assert chat(cache_salt=None).salt == ""
    assert stored(chat(cache_salt="s" * 256)).salt == "s" * 256
    for wrong in ("", "s" * 257, 5):
        refused("cache_salt", wrong)


def test_cache_salt_never_joins_two_tenants() -> None:
    def namespace(tenant: str, salt: str) -> str:
        return Request("u", chat().kind, "m", chat().params, {}, tenant=tenant, salt=salt).cache_namespace

    pairs = [
        ("", ""),
        ("", "a"),
        ("a", ""),
        ("a", "b"),
        ("ab", ""),
        ("", "ab"),
        ("1", ":a"),
        ("", "1:a"),
        ("b", "a"),
    ]
    assert len({namespace(*pair) for pair in pairs}) == len(pairs)
    assert namespace("a", "b") == namespace("a", "b")


def test_request_id_and_rid_are_labels() -> None:
    assert chat(request_id="mine").label == complete(rid="mine").label == "mine"
    assert stored(chat(request_id="a", rid="b", label="header")).label == "header"
    assert chat(request_id="mine").uid == ""
    assert chat().label == ""
    for wrong in ("", "a" * 129, "two words", "ümlaut", "a\n", 5):
        refused("request_id", wrong)
        refused("rid", wrong)


def test_user_safety_identifier_prompt_cache_key() -> None:
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        assert chat(seed=1, **{name: "x" * 1024}).to_fields().keys() == chat(seed=1).to_fields().keys()
        refused(name, "x" * 1025)
        refused(name, 5)


def test_metadata() -> None:
    full = {f"{number:064}": "v" * 512 for number in range(16)}
    assert chat(seed=1, metadata=full).params == chat(seed=1, metadata=None).params
    for wrong in ({**full, "more": ""}, {"k" * 65: ""}, {"k": "v" * 513}, {"k": 1}, ["k"], "k"):
        refused("metadata", wrong)


def test_service_tier_is_told_as_it_was_served() -> None:
    assert "tier" not in chat().reply
    assert chat(service_tier="flex").reply["tier"] == "flex"
    for asked in ("auto", "default", "priority", "scale"):
        assert chat(service_tier=asked).reply["tier"] == "default"


def test_stream_options() -> None:
    asked = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    reply = chat(stream=True, stream_options=asked).reply
    assert (reply["usage"], reply["running_usage"]) == (True, True)


def test_enable_force_include_usage() -> None:
    rules = house(enable_force_include_usage="true")
    assert chat(rules, stream=True).reply["usage"] is True
    assert complete(rules, stream=True, stream_options={"include_usage": False}).reply["usage"] is True
    assert chat(stream=True).reply["usage"] is False


def going_on(content: Any) -> dict[str, Any]:
    """Fields of a chat whose last message is continued."""
    return {"messages": [*USER, {"role": "assistant", "content": content}], "continue_final_message": True}


@pytest.mark.parametrize(
    ("parser", "fields", "expected"),
    [
        ("none", {}, None),
        ("deepseek_r1", {}, "deepseek_r1"),
        ("qwen3", {}, "qwen3"),
        ("qwen3", {"chat_template_kwargs": {"enable_thinking": True}}, "qwen3"),
        ("qwen3", {"chat_template_kwargs": {"enable_thinking": False}}, None),
        ("deepseek_r1", {"chat_template_kwargs": {"enable_thinking": False}}, "deepseek_r1"),
        ("qwen3", {"separate_reasoning": False}, None),
        ("qwen3", {"include_reasoning": False}, "qwen3"),
        ("deepseek_r1", going_on("The capital of"), None),
        ("deepseek_r1", going_on("<think>hm</think>The capital of"), None),
        ("qwen3", going_on("The capital of"), None),
        ("qwen3", going_on("<think>hm, "), "deepseek_r1"),
        ("deepseek_r1", going_on("<think>hm, "), "deepseek_r1"),
        ("qwen3", going_on([{"type": "text", "text": "<think>"}, "hm, "]), "deepseek_r1"),
        ("qwen3", going_on(None), None),
    ],
)
def test_reasoning_parser(parser: str, fields: dict[str, Any], expected: str | None) -> None:
    reply = chat(house(reasoning_parser=parser), **fields).reply
    assert reply.get("reasoning") == expected
    assert bool(reply.get("hide_reasoning")) is ("include_reasoning" in fields)
    assert "reasoning" not in complete(house(reasoning_parser=parser)).reply


def test_default_chat_template_kwargs_can_switch_thinking_off() -> None:
    rules = house(reasoning_parser="qwen3", default_chat_template_kwargs='{"enable_thinking": false}')
    assert "reasoning" not in chat(rules).reply
    assert "reasoning" in chat(rules, chat_template_kwargs={"enable_thinking": True}).reply


def test_truncate_prompt_tokens() -> None:
    assert "truncate_prompt_tokens" not in chat().payload
    assert chat(truncate_prompt_tokens=-1).payload["truncate_prompt_tokens"] == -1
    assert complete(truncate_prompt_tokens=5).payload["truncate_prompt_tokens"] == 5
    refused("truncate_prompt_tokens", -2)


def test_max_new_tokens_of_the_model_is_a_bound() -> None:
    model = ModelInfo("m", 100, 50, 1, generation_defaults={"max_new_tokens": 20.0})

    def limit(**fields: Any) -> int | None:
        ask = ChatRequest.parse({"model": "m", "messages": USER, **fields})
        return ask.to_request(model).params.max_tokens

    assert (limit(), limit(max_tokens=5), limit(max_tokens=50)) == (20, 5, 20)


def test_n_with_temperature_0() -> None:
    request = chat(n=3, temperature=0)
    assert (request.n, request.choices, request.params.temperature) == (3, 3, 0.0)


def test_unknown_fields_are_ignored_and_written_down_now_and_then(caplog: Any) -> None:
    rules = house()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            rules.look_at(ChatRequest, ["model", "messages", "made_up"])
            rules.look_at(CompletionRequest, ["prompt", "messages"])
        for number in range(300):
            rules.look_at(ChatRequest, [f"made_up_{number}" + "x" * 1000])
    assert [record.fields["field"] for record in caplog.records][:2] == ["made_up", "messages"]
    assert len(caplog.records) == 302
    assert len(rules._told) <= 100
    assert max(map(len, rules._told)) <= 64


def test_strict_fields() -> None:
    rules = house(strict_fields="true")
    known = [
        "model",
        "messages",
        "metadata",
        "tools",
        "prediction",
        "verbosity",
        "store",
        "modalities",
        "user",
    ]
    rules.look_at(ChatRequest, known)
    rules.look_at(CompletionRequest, ["prompt", "suffix", "best_of", "echo"])
    with pytest.raises(
        InvalidRequestError, match="Unrecognized request argument supplied: made_up"
    ) as caught:
        rules.look_at(ChatRequest, ["model", "made_up"])
    assert caught.value.param == "made_up"


def test_switches_need_no_value() -> None:
    from cli.main import build_parser

    parsed = vars(
        build_parser().parse_args(["api", "--strict-fields", "--enable-force-include-usage", "false"])
    )
    settings = resolve(Command.API, parsed, {})
    assert (settings.strict_fields, settings.enable_force_include_usage) == (True, False)


def test_what_is_json_in_settings_is_checked(capsys: Any) -> None:
    from cli.main import main

    for wrong in ("{", "[]", "1"):
        assert main(["api", "--default-chat-template-kwargs", wrong]) == 2
        assert "must be a JSON object" in capsys.readouterr().err
    kwargs = resolve(
        Command.API, {"default_chat_template_kwargs": '{"a":1}'}, {}
    ).default_chat_template_kwargs
    assert json.loads(kwargs) == {"a": 1}
