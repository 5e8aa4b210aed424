"""Request bodies: what is accepted, what it becomes on the bus, and what is refused by name."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from api.errors import from_validation
from api.schemas.chat import ChatRequest
from api.schemas.completions import CompletionRequest
from api.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from common.bus.registry import ModelInfo
from common.errors import InvalidRequestError
from common.messages import Kind, Request
from common.sampling import SamplingParams

MODEL = ModelInfo("m", max_model_len=100, vocab_size=50, created=1)
USER = [{"role": "user", "content": "hi"}]


def chat(**fields: object) -> Request:
    return ChatRequest.parse({"model": "m", "messages": USER, **fields}).to_request(MODEL)


def complete(**fields: object) -> Request:
    return CompletionRequest.parse({"model": "m", "prompt": "hi", **fields}).to_request(MODEL)


def refusal(make: object, **fields: object) -> InvalidRequestError:
    try:
        make(**fields)  # type: ignore[operator]
    except ValidationError as error:
        return from_validation(error)
    except InvalidRequestError as error:
        return error
    raise AssertionError(f"accepted: {fields}")


def test_what_is_left_out_has_openais_defaults() -> None:
    request = chat()
    assert request.kind is Kind.CHAT
    assert request.params == SamplingParams(seed=request.params.seed)
    assert request.params.max_tokens is None
    assert (request.n, request.choices) == (1, 1)
    assert request.reply["stream"] is request.reply["usage"] is False
    assert complete().params.max_tokens == 16


def test_null_is_the_same_as_left_out() -> None:
    fields = set(ChatRequest.model_fields) - {"model", "messages"}
    nulls = dict.fromkeys(fields) | {"seed": 3}
    assert chat(**nulls).params == chat(seed=3).params
    assert chat(**nulls).payload == chat(seed=3).payload


def test_a_seed_is_drawn_and_a_given_one_kept() -> None:
    assert chat().params.seed != chat().params.seed
    assert chat(seed=-(2**63)).params.seed == -(2**63)
    assert chat(seed=0).params.seed == 0


def test_every_sampling_field_reaches_the_bus() -> None:
    params = chat(
        max_tokens=5, min_tokens=2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, presence_penalty=1,
        frequency_penalty=-1, repetition_penalty=1.5, logit_bias={"3": -100, "49": 2}, seed=9, stop="x",
        stop_token_ids=[4], include_stop_str_in_output=True, ignore_eos=True, skip_special_tokens=False,
    ).params  # fmt: skip
    assert params == SamplingParams(
        max_tokens=5, min_tokens=2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, presence_penalty=1.0,
        frequency_penalty=-1.0, repetition_penalty=1.5, logit_bias=((3, -100.0), (49, 2.0)), seed=9,
        stop=("x",), stop_token_ids=(4,), include_stop_str_in_output=True, ignore_eos=True,
        skip_special_tokens=False,
    )  # fmt: skip


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).params.max_tokens == 7
    assert chat(max_tokens=5, max_completion_tokens=None).params.max_tokens == 5


@pytest.mark.parametrize(
    ("given", "temperature"), [({"temperature": 0}, 0.0), ({"temperature": 1e-7}, 0.0), ({"top_p": 0}, 0.0)]
)
def test_what_means_greedy_is_greedy(given: dict[str, float], temperature: float) -> None:
    params = chat(**given).params
    assert params.temperature == temperature
    assert params.top_p > 0


@pytest.mark.parametrize("off", [-1, 0, None, 50, 10**9])
def test_top_k_is_off(off: int | None) -> None:
    assert chat(top_k=off).params.top_k == 0


def test_the_models_own_defaults_stand_in() -> None:
    model = ModelInfo("m", 100, 50, 1, generation_defaults={"temperature": 0.6, "top_k": 20, "top_p": 0.8})
    parsed = ChatRequest.parse({"model": "m", "messages": USER, "top_p": 1})
    params = parsed.to_request(model).params
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 1.0)


@pytest.mark.parametrize("content", ["plain", [{"type": "text", "text": "a"}, "b"], []])
def test_content_goes_on_as_it_is(content: object) -> None:
    [message] = chat(messages=[{"role": "user", "content": content}]).payload["messages"]
    assert message == {"role": "user", "content": content}


def test_our_own_messages_can_be_replayed() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    [_, first, second, third] = chat(
        messages=[
            *USER,
            {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": []},
            {"role": "assistant", "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c", "content": "2"},
        ]
    ).payload["messages"]
    assert first == {"role": "assistant", "annotations": [], "tool_calls": []}
    assert second == {"role": "assistant", "tool_calls": [call], "reasoning_content": "hm"}
    assert third == {"role": "tool", "content": "2", "tool_call_id": "c"}


def test_the_last_message_can_be_left_open() -> None:
    open_end = [*USER, {"role": "assistant", "content": "The capital of"}]
    payload = chat(messages=open_end, continue_final_message=True).payload
    assert (payload["continue_final_message"], payload["add_generation_prompt"]) == (True, False)
    both = refusal(chat, messages=open_end, continue_final_message=True, add_generation_prompt=True)
    assert both.param == "continue_final_message"
    assert refusal(chat, continue_final_message=True).param == "messages"


def test_arguments_of_the_template_go_on_to_it() -> None:
    kwargs = {"enable_thinking": False}
    assert chat(chat_template_kwargs=kwargs).payload["chat_template_kwargs"] == kwargs


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompts_of_every_form(prompt: object, prompts: list[object]) -> None:
    request = complete(prompt=prompt, n=3)
    assert request.payload["prompt"] == prompts
    assert (request.n, request.choices) == (3, 3 * len(prompts))


@pytest.mark.parametrize(
    "prompt", [[], [[]], [[1], []], [1, "a"], [True], [1.5], [[1], "a"], [None], {"a": 1}, 5, None, [[[1]]]]
)
def test_prompts_that_are_none(prompt: object) -> None:
    assert (refusal(complete, prompt=prompt).param or "").startswith("prompt")


@pytest.mark.parametrize("ids", [[-1], [50], [2**40], [[1], [50]]])
def test_token_ids_must_be_in_the_vocabulary(ids: list[object]) -> None:
    assert refusal(complete, prompt=ids).param == "prompt"


WRONG = {
    "temperature": [True, "1", -1, 2.1, float("nan"), float("inf"), [1]],
    "top_p": [-0.1, 1.1, "x"],
    "top_k": [-2, 1.5, True],
    "min_p": [-0.1, 1.5],
    "n": [0, -1, 129, 1.0, True, "1"],
    "max_tokens": [0, -1, 2**63, 1e30, "5", True],
    "min_tokens": [-1, 1.5],
    "seed": [True, 2**63, -(2**63) - 1, 1.5, "1"],
    "presence_penalty": [-2.1, 2.1, True],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1, 1e-300, 1e300],
    "stop": [[""], "", [1], 5, {"a": 1}, ["x"] * 33, "y" * 1025],
    "stop_token_ids": [[-1], [50], [True], ["1"], 5],
    "logit_bias": [
        {"x": 1},
        {"-1": 1},
        {"1.5": 1},
        {"50": 1},
        {"1": 101},
        {"1": True},
        {"1": "x"},
        [1],
        {"٣": 1},
    ],
    "stream": ["true", 1],
    "model": ["", 5, None],
    "ignore_eos": [1, "yes"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
def test_wrong_values_are_refused_by_name(name: str, value: object) -> None:
    for make in (chat, complete):
        error = refusal(make, **{name: value})
        assert (error.param or "").startswith(name)
        assert error.message.startswith(name)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hi",
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "robot", "content": "x"}],
        [{"content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": 5}],
        [{"role": "assistant", "tool_calls": "x"}],
        [{"role": "assistant", "tool_calls": [{"function": {}}]}],
        ["hi"],
    ],
)
def test_wrong_messages_are_refused(messages: object) -> None:
    assert (refusal(chat, messages=messages).param or "").startswith("messages")


def test_stream_options_need_a_stream() -> None:
    assert refusal(chat, stream_options={}).param == "stream_options"
    assert refusal(chat, stream=False, stream_options={"include_usage": True}).param == "stream_options"
    assert chat(stream=True, stream_options={"include_obfuscation": True}).reply["usage"] is False
    assert chat(stream=True, stream_options={"include_usage": True}).reply["usage"] is True


def test_min_tokens_must_fit() -> None:
    assert refusal(chat, min_tokens=6, max_tokens=5).param == "min_tokens"
    assert refusal(complete, min_tokens=17).param == "min_tokens"


def test_logprobs_of_a_chat() -> None:
    assert chat().params.logprobs is None
    assert (chat(logprobs=True).params.logprobs, chat(logprobs=True).reply["logprobs"]) == (0, 0)
    asked = chat(logprobs=True, top_logprobs=20)
    assert (asked.params.logprobs, asked.params.prompt_logprobs, asked.reply["logprobs"]) == (20, None, 20)
    assert refusal(chat, top_logprobs=1).param == "top_logprobs"
    assert refusal(chat, logprobs=False, top_logprobs=1).param == "top_logprobs"
    for wrong in (21, -1, True, "1"):
        assert refusal(chat, logprobs=True, top_logprobs=wrong).param == "top_logprobs"
    assert refusal(chat, logprobs=1).param == "logprobs"


def test_logprobs_of_a_completion() -> None:
    assert complete().params.logprobs is None
    for count in (0, 20):
        asked = complete(logprobs=count)
        assert (asked.params.logprobs, asked.params.prompt_logprobs, asked.reply["logprobs"]) == (
            count, None, count,
        )  # fmt: skip
    for wrong in (21, -1, True, 1.0):
        assert refusal(complete, logprobs=wrong).param == "logprobs"


def test_an_echo_needs_the_logprobs_of_its_prompt() -> None:
    asked = complete(echo=True)
    assert (asked.params.prompt_logprobs, asked.payload["echo"], asked.reply["echo"]) == (None, True, True)
    assert complete(echo=True, logprobs=0).params.prompt_logprobs == 0
    assert complete(echo=True, logprobs=3, prompt_logprobs=5).params.prompt_logprobs == 5
    assert complete(echo=True, logprobs=3, prompt_logprobs=1).params.prompt_logprobs == 3
    assert "echo" not in complete(echo=False).reply
    assert refusal(complete, echo="yes").param == "echo"


def test_only_an_echo_may_have_no_tokens() -> None:
    assert complete(echo=True, max_tokens=0).params.max_tokens == 0
    assert refusal(complete, max_tokens=0).param == "max_tokens"
    assert refusal(complete, max_tokens=0, echo=True, min_tokens=1).param == "min_tokens"
    assert complete(max_tokens=None).params.max_tokens == 16


def test_logprobs_of_a_prompt() -> None:
    for make in (chat, complete):
        asked = make(prompt_logprobs=0)
        assert (asked.params.prompt_logprobs, asked.reply["prompt_logprobs"]) == (0, 0)
        assert refusal(make, prompt_logprobs=1, stream=True).param == "prompt_logprobs"
        for wrong in (21, -1, True):
            assert refusal(make, prompt_logprobs=wrong).param == "prompt_logprobs"


UNSUPPORTED = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "response_format": {"type": "json_object"},
    "modalities": ["text", "audio"],
    "audio": {"voice": "x"},
    "store": True,
    "structured_outputs": {"regex": "a"},
    "guided_json": {"type": "object"},
    "echo": True,
    "chat_template": "{{ messages }}",
    "return_token_ids": True,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_would_change_the_answer_is_refused_by_name(name: str) -> None:
    error = refusal(chat, **{name: UNSUPPORTED[name]})
    assert error.param == name
    assert name in error.message
    assert "not supported" in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [("suffix", "x"), ("best_of", 2), ("return_tokens_as_token_ids", True)],
)
def test_completions_refuse_too(name: str, value: object) -> None:
    assert refusal(complete, **{name: value}).param == name


@pytest.mark.parametrize(
    "harmless",
    [
        {"tools": []},
        {"tools": None, "tool_choice": "auto", "parallel_tool_calls": True},
        {"response_format": {"type": "text"}},
        {"logprobs": False, "top_logprobs": 0},
        {"modalities": ["text"], "store": False, "metadata": {"a": "b"}, "service_tier": "auto"},
        {
            "user": "u",
            "safety_identifier": "s",
            "prompt_cache_key": "k",
            "enable_thinking": True,
            "made_up": [1],
        },
        {"echo": False, "prompt_logprobs": None, "guided_json": None},
    ],
)
def test_harmless_and_unknown_fields_are_accepted(harmless: dict[str, object]) -> None:
    assert chat(seed=1, **harmless).params == chat(seed=1).params


def test_harmless_values_of_completions() -> None:
    assert complete(suffix="", best_of=None, logprobs=None).choices == 1
    assert complete(n=2, best_of=2).choices == 2


@pytest.mark.parametrize(
    ("tier", "cls"),
    [
        (None, "interactive"),
        ("auto", "interactive"),
        ("default", "interactive"),
        ("priority", "interactive"),
        ("scale", "interactive"),
        ("flex", "batch"),
    ],
)
def test_the_service_tier_is_the_class_of_work(tier: str | None, cls: str) -> None:
    assert chat(service_tier=tier).cls == complete(service_tier=tier).cls == cls
    assert refusal(chat, service_tier="cheap").param == "service_tier"


def test_choices_are_bounded() -> None:
    assert refusal(complete, prompt=["a"] * 9, n=128).param == "n"
    assert refusal(complete, prompt=["a"] * 1025).param == "prompt"


def test_many_problems_make_a_short_message() -> None:
    error = refusal(chat, messages=[{"role": "user", "content": 5}] * 1000)
    assert len(error.message) < 1000
    assert error.param == "messages[0].content"
    assert "more problems" in error.message


def test_tokenize_takes_a_text_or_a_conversation() -> None:
    text = TokenizeRequest.parse({"prompt": "x", "return_token_strs": True}).to_request(MODEL)
    assert text.payload == {"prompt": "x", "add_special_tokens": True, "return_token_strs": True}
    talk = TokenizeRequest.parse({"messages": USER}).to_request(MODEL)
    assert talk.payload["messages"] == USER
    assert talk.payload["add_special_tokens"] is False
    for wrong in ({}, {"prompt": "x", "messages": USER}):
        assert refusal(lambda body=wrong: TokenizeRequest.parse(body)).param == "prompt"


def test_detokenize_takes_ids_of_the_vocabulary() -> None:
    assert DetokenizeRequest.parse({"tokens": [1, 2]}).to_request(MODEL).payload == {"tokens": [1, 2]}
    assert DetokenizeRequest.parse({"tokens": []}).to_request(MODEL).payload == {"tokens": []}
    for wrong in ([50], [-1], [2**40]):
        assert (
            refusal(lambda ids=wrong: DetokenizeRequest.parse({"tokens": ids}).to_request(MODEL)).param
            == "tokens"
        )
    assert refusal(lambda: DetokenizeRequest.parse({"tokens": [True]})).param == "tokens[0]"
