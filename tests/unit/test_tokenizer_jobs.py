"""Requests through the tokenizer's logic: prompts, limits, answers, and what is wrong with a request."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from common import errors
from common.messages import Kind, Request
from common.sampling import MAX_PROMPT_LOGPROBS, SamplingParams
from tests.helpers.text import bundled_codec, bundled_source
from workers.text.chat import ChatTemplate
from workers.tokenizer.jobs import MAX_PROMPTS, Jobs

CODEC = bundled_codec()
#: The model has more rows than the tokenizer has tokens, as padded models have.
ROWS = CODEC.vocab_size + 8
JOBS = Jobs(CODEC, ChatTemplate.of(bundled_source()), ROWS)
CONTEXT = 64
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def work(
    kind: Kind, limit: int = CONTEXT, params: SamplingParams | None = None, **payload: Any
) -> list[list[int]]:
    request = Request("u", kind, "m", params or SamplingParams(), payload)
    prompts, answer = JOBS.work(request, limit)
    assert answer == ""
    return prompts


def answer(kind: Kind, limit: int = CONTEXT, **payload: Any) -> dict[str, Any]:
    prompts, text = JOBS.work(Request("u", kind, "m", SamplingParams(), payload), limit)
    assert prompts == []
    found: dict[str, Any] = json.loads(text)
    return found


def refused(kind: Kind, param: str, match: str | None = None, **options: Any) -> errors.MillstreamError:
    with pytest.raises(errors.InvalidRequestError, match=match) as caught:
        JOBS.work(
            Request("u", kind, "m", options.pop("params", SamplingParams()), options.pop("payload")),
            options.pop("limit", CONTEXT),
        )
    assert caught.value.param == param
    assert errors.kind_of(caught.value) in {"invalid", "context"}, "it survives the bus as a client's error"
    return caught.value


def encode(text: str) -> list[int]:
    return CODEC.encode(text, add_special_tokens=True)


def test_chat() -> None:
    (ids,) = work(Kind.CHAT, messages=FRANCE)
    assert len(ids) == 37
    assert CODEC.decode(ids, skip_special_tokens=False).endswith("<|im_start|>assistant\n")


def test_chat_options() -> None:
    (closed,) = work(Kind.CHAT, messages=FRANCE, add_generation_prompt=False)
    assert CODEC.decode(closed, skip_special_tokens=False).endswith("France?<|im_end|>\n")
    messages = [*FRANCE, {"role": "assistant", "content": "The capital of"}]
    (left_open,) = work(Kind.CHAT, messages=messages, continue_final_message=True)
    assert CODEC.decode(left_open, skip_special_tokens=False).endswith(
        "<|im_start|>assistant\nThe capital of"
    )
    refused(
        Kind.CHAT,
        "continue_final_message",
        payload={"messages": messages, "continue_final_message": True, "add_generation_prompt": True},
    )
    refused(Kind.CHAT, "chat_template_kwargs", payload={"messages": FRANCE, "chat_template_kwargs": []})
    refused(
        Kind.CHAT, "chat_template_kwargs", payload={"messages": FRANCE, "chat_template_kwargs": {"tools": 1}}
    )


@pytest.mark.parametrize("messages", [None, [], [{"role": "user"}], [{"content": "x"}], "x"])
def test_messages_that_are_none(messages: Any) -> None:
    refused(Kind.CHAT, "messages", payload={"messages": messages})


def test_control_tokens_in_messages_are_text_unless_wanted() -> None:
    messages = [{"role": "user", "content": "<|im_end|>"}]
    (ids,) = work(Kind.CHAT, messages=messages)
    parsing = Jobs(CODEC, ChatTemplate.of(bundled_source()), ROWS, literal_special_tokens=False)
    (parsed,), _ = parsing.work(
        Request("u", Kind.CHAT, "m", SamplingParams(), {"messages": messages, "chat_template_kwargs": None}),
        CONTEXT,
    )
    assert (ids.count(2), parsed.count(2)) == (2, 3)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hello world", [encode("Hello world")]),
        (["Hello", " world"], [encode("Hello"), encode(" world")]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([0, ROWS - 1], [[0, ROWS - 1]]),
        ("<|im_end|>", [[2]]),
    ],
)
def test_prompts(prompt: Any, expected: list[list[int]]) -> None:
    assert work(Kind.COMPLETION, prompt=prompt) == expected


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        [[]],
        ["a", ""],
        [[1], []],
        None,
        5,
        {},
        [1, "a"],
        ["a", 1],
        [1.5],
        [None],
        [True],
        [[True]],
        [[1, [2]]],
    ],
)
def test_prompts_that_are_none(prompt: Any) -> None:
    refused(Kind.COMPLETION, "prompt", payload={"prompt": prompt})


@pytest.mark.parametrize("token", [-1, ROWS, 2**31, 2**63, 2**200])
def test_token_ids_the_model_has_not(token: int) -> None:
    for prompt in ([1, token], [[1], [token]]):
        refused(Kind.COMPLETION, "prompt", str(token), payload={"prompt": prompt})
    refused(Kind.DETOKENIZE, "tokens", str(token), payload={"tokens": [token]})
    for params in (SamplingParams(logit_bias=((token, 1.0),)), SamplingParams(stop_token_ids=(1, token))):
        name = "logit_bias" if params.logit_bias else "stop_token_ids"
        refused(Kind.COMPLETION, name, str(token), payload={"prompt": "x"}, params=params)
        refused(Kind.CHAT, name, str(token), payload={"messages": FRANCE}, params=params)


def test_too_many_prompts() -> None:
    assert len(work(Kind.COMPLETION, prompt=["a"] * MAX_PROMPTS)) == MAX_PROMPTS
    refused(Kind.COMPLETION, "prompt", payload={"prompt": ["a"] * (MAX_PROMPTS + 1)})


@pytest.mark.parametrize(("length", "fits"), [(CONTEXT - 1, True), (CONTEXT, False), (CONTEXT + 1, False)])
def test_a_prompt_leaves_room_for_a_token(length: int, fits: bool) -> None:
    if fits:
        assert work(Kind.COMPLETION, prompt=[7] * length) == [[7] * length]
    else:
        error = refused(Kind.COMPLETION, "prompt", payload={"prompt": [[7], [7] * length]})
        assert error.code == "context_length_exceeded"
        assert (
            f"maximum context length is {CONTEXT} tokens. However, your prompt resulted in {length} tokens"
            in str(error)
        )
    scoring = SamplingParams(max_tokens=0)
    if length <= CONTEXT:
        assert work(Kind.COMPLETION, params=scoring, prompt=[7] * length) == [[7] * length]


@pytest.mark.parametrize(("limit", "fits"), [(38, True), (37, False), (36, False)])
def test_a_conversation_leaves_room_for_a_token(limit: int, fits: bool) -> None:
    if fits:
        assert len(work(Kind.CHAT, limit, messages=FRANCE)[0]) == 37
    else:
        error = refused(Kind.CHAT, "messages", payload={"messages": FRANCE}, limit=limit)
        assert (
            f"maximum context length is {limit} tokens. However, your messages resulted in 37 tokens"
            in str(error)
        )
        assert error.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "text", ["word " * 20_000, "a" * 4_000_000, " " * 4_000_000, "日" * 4_000_000, "x " * 2_000_000]
)
def test_giant_texts_are_refused_quickly(text: str) -> None:
    start = time.process_time()
    for kind, param, payload in (
        (Kind.COMPLETION, "prompt", {"prompt": text}),
        (Kind.CHAT, "messages", {"messages": [{"role": "user", "content": text}]}),
    ):
        error = refused(kind, param, "resulted in (at least )?[0-9]+ tokens", payload=payload, limit=8192)
        assert error.code == "context_length_exceeded"
    assert time.process_time() - start < 5


def test_twenty_thousand_words_are_counted() -> None:
    error = refused(Kind.COMPLETION, "prompt", payload={"prompt": "word " * 20_000}, limit=8192)
    assert "resulted in 20001 tokens" in str(error)


def test_tokenize() -> None:
    assert answer(Kind.TOKENIZE, prompt="Hello world") == {
        "count": 2,
        "max_model_len": CONTEXT,
        "tokens": [19556, 905],
    }
    assert answer(Kind.TOKENIZE, prompt="")["count"] == 0
    assert answer(Kind.TOKENIZE, messages=FRANCE)["count"] == 37
    assert answer(Kind.TOKENIZE, messages=FRANCE, add_generation_prompt=False)["count"] == 33
    spelled = answer(Kind.TOKENIZE, prompt="Hello world", return_token_strs=True)
    assert spelled["token_strs"] == ["Hello", "Ġworld"]
    assert answer(Kind.TOKENIZE, prompt="word " * 100)["count"] > CONTEXT, (
        "counting is not limited to what fits"
    )
    refused(Kind.TOKENIZE, "prompt", payload={"prompt": "word " * 20_000})
    refused(Kind.TOKENIZE, "prompt", payload={"prompt": [1, 2]})
    refused(Kind.TOKENIZE, "prompt", payload={})


def test_detokenize() -> None:
    assert answer(Kind.DETOKENIZE, tokens=[19556, 905, 2]) == {"prompt": "Hello world<|im_end|>"}
    assert answer(Kind.DETOKENIZE, tokens=[]) == {"prompt": ""}
    assert answer(Kind.DETOKENIZE, tokens=[ROWS - 1]) == {"prompt": ""}
    for tokens in (None, "1", [True], ["1"], [1.0]):
        refused(Kind.DETOKENIZE, "tokens", payload={"tokens": tokens})


def test_half_a_surrogate_pair() -> None:
    with pytest.raises(errors.InvalidRequestError, match="surrogate"):
        work(Kind.COMPLETION, prompt="a\ud83d")


def test_truncate_prompt_tokens_keeps_the_end() -> None:
    ids = list(range(100, 100 + 2 * CONTEXT))
    assert work(Kind.COMPLETION, prompt=[ids, [5]], truncate_prompt_tokens=3) == [ids[-3:], [5]]
    assert work(Kind.COMPLETION, prompt=ids, truncate_prompt_tokens=-1) == [ids[-CONTEXT + 1 :]]
    (whole,) = work(Kind.CHAT, messages=FRANCE)
    assert work(Kind.CHAT, messages=FRANCE, truncate_prompt_tokens=9) == [whole[-9:]]
    refused(Kind.COMPLETION, "prompt", payload={"prompt": ids, "truncate_prompt_tokens": CONTEXT})
    for wrong in (-2, CONTEXT + 1, True, "1"):
        payload = {"prompt": ids, "truncate_prompt_tokens": wrong}
        refused(Kind.COMPLETION, "truncate_prompt_tokens", payload=payload)


def test_a_giant_text_is_refused_although_it_would_be_cut() -> None:
    payload = {"prompt": "word " * 200_000, "truncate_prompt_tokens": 5}
    refused(Kind.COMPLETION, "prompt", "at least", payload=payload)


def test_variables_of_the_template_that_a_request_leaves_out() -> None:
    template = ChatTemplate({"default": "{{ a }} {{ b }}"}, {})
    jobs = Jobs(CODEC, template, ROWS, template_kwargs={"a": "one", "b": "two"})

    def text(**payload: Any) -> str:
        prompts, _ = jobs.work(Request("u", Kind.CHAT, "m", SamplingParams(), payload), CONTEXT)
        return CODEC.decode(prompts[0], skip_special_tokens=False)

    assert text(messages=FRANCE) == "one two"
    assert text(messages=FRANCE, chat_template_kwargs={"b": "three"}) == "one three"


def test_an_echo_is_of_what_was_kept_of_the_prompt() -> None:
    payload = {"prompt": ["The capital of France is", "Hi"], "truncate_prompt_tokens": 2, "echo": True}
    prompts, echo = JOBS.work(Request("u", Kind.COMPLETION, "m", SamplingParams(), payload), CONTEXT)
    assert [text for text, _ in json.loads(echo)] == [
        CODEC.decode(prompts[0], skip_special_tokens=False),
        "Hi",
    ]
    assert prompts[0] == encode("The capital of France is")[-2:]


def echo(prompt: Any, **payload: Any) -> str:
    request = Request("u", Kind.COMPLETION, "m", SamplingParams(), {"prompt": prompt, **payload})
    return JOBS.work(request, CONTEXT)[1]


@pytest.mark.parametrize("name", ["prompt_logprobs", "logprobs"])
def test_the_logprobs_of_prompts_are_bounded(name: str) -> None:
    n, top = 3, 20
    most = MAX_PROMPT_LOGPROBS // (n * (top + 1))
    params = SamplingParams(max_tokens=0, prompt_logprobs=top)
    reply = {name: top}

    def ask(*lengths: int) -> Request:
        payload = {"prompt": [[1] * length for length in lengths], "echo": True}
        return Request("u", Kind.COMPLETION, "m", params, payload, reply, n=n)

    assert len(JOBS.work(ask(most - 9, 9), most)[0]) == 2
    with pytest.raises(errors.InvalidRequestError, match=f"its {most + 1} tokens") as caught:
        JOBS.work(ask(most - 9, 10), most)
    assert caught.value.param == name


def test_prompts_are_echoed_if_asked_for() -> None:
    assert echo("Hi <|im_end|>") == echo("Hi", echo=False) == ""
    assert echo("Hi <|im_end|>", echo=True) == '[["Hi <|im_end|>",0]]'
    ids = [encode("Hello world 🌶"), [2]]
    assert echo(ids, echo=True) == '[["Hello world 🌶",0],["<|im_end|>",0]]'
    assert echo([19556, 905, 15107, 230], echo=True) == '[["Hello world ",0]]', "ends inside a character"
