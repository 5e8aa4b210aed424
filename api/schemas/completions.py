"""`POST /v1/completions`: the request, with a prompt that is text, token ids, or a list of either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from api.schemas import unsupported
from api.schemas.common import (
    COUNT_MAX,
    GENERATION_RULES,
    MAX_CHOICES,
    MAX_LOGPROBS,
    Flag,
    GenerationFields,
    check_token_ids,
    only_with,
)
from common import messages as bus
from common.bus.registry import ModelInfo
from common.errors import InvalidRequestError

#: OpenAI's own default for this endpoint.
DEFAULT_MAX_TOKENS = 16

Prompt = str | list[int]
_Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
_Several = Field(min_length=1, max_length=MAX_CHOICES)
_AnyPrompt = str | _Ids | Annotated[list[str], _Several] | Annotated[list[_Ids], _Several]


def _prompts(value: Any) -> list[Prompt]:
    """One prompt or several, as a list of prompts. An empty text is left to the tokenizer: it may add ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise PydanticCustomError(
            "prompt_type", "Input should be a string, a list of strings, token ids, or lists of token ids"
        )
    if not value:
        raise PydanticCustomError("prompt_empty", "The prompt must not be empty")
    if all(isinstance(each, str) for each in value):
        return _bounded(value)
    if _are_ids(value):
        return [value]
    if all(isinstance(each, list) and _are_ids(each) for each in value):
        return _bounded(value)
    if any(each == [] for each in value):
        raise PydanticCustomError("prompt_empty", "The prompt must not be empty")
    raise PydanticCustomError(
        "prompt_mixed", "A list should hold only strings, only token ids, or only lists of token ids"
    )


def _are_ids(value: list[Any]) -> bool:
    """Whether this is a non-empty list of integers (true and false are none)."""
    return bool(value) and set(map(type, value)) == {int}


def _bounded(value: list[Prompt]) -> list[Prompt]:
    if len(value) > MAX_CHOICES:
        raise PydanticCustomError(
            "prompt_count", "There may be at most {limit} prompts", {"limit": MAX_CHOICES}
        )
    return value


class CompletionRequest(GenerationFields):
    """Prompts to be continued."""

    model_config = ConfigDict(
        json_schema_extra={"allOf": [*GENERATION_RULES, only_with("max_tokens", {"const": 0}, "echo")]}
    )

    prompt: Annotated[list[Prompt], PlainValidator(_prompts, json_schema_input_type=_AnyPrompt)]
    """Text, token ids, or a list of either; choice `i * n + j` is sample j of prompt i."""
    max_tokens: Annotated[int, Field(strict=True, ge=0, le=COUNT_MAX)] | None = None
    """Most tokens to generate; cut to the room that is left. 0, with `echo` only, scores the prompt and
    generates nothing. Left out: 16.
    """
    logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = None
    """Tell how likely each token was, and so many of the likeliest beside it. Left out: nothing."""
    echo: Flag | None = None
    """The prompt again before each completion, and with `logprobs` its tokens. Left out: false."""
    best_of: Annotated[int, Field(strict=True)] | None = None
    """Only when equal to `n`."""

    @model_validator(mode="after")
    def _choices_are_bounded(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequestError("best_of is only supported when it equals n.", param="best_of")
        if len(self.prompt) * (self.n or 1) > MAX_CHOICES:
            raise InvalidRequestError(f"Prompts times n may be at most {MAX_CHOICES}.", param="n")
        return self

    @model_validator(mode="after")
    def _no_tokens_need_an_echo(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError(
                "max_tokens must be at least 1, except with echo, to score a prompt.", param="max_tokens"
            )
        return self

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> CompletionRequest:
        """The request in ``body``; raises pydantic's ValidationError or `InvalidRequestError`."""
        unsupported.refuse(body, unsupported.COMPLETION)
        return cls.model_validate(body)

    def to_request(self, model: ModelInfo) -> bus.Request:
        """The request for the bus, without a uid."""
        for prompt in self.prompt:
            if not isinstance(prompt, str):
                check_token_ids(prompt, model, "prompt")
        n = self.n or 1
        choices = len(self.prompt) * n
        payload = {"prompt": self.prompt, "add_special_tokens": self.add_special_tokens is not False}
        return bus.Request(
            uid="",
            kind=bus.Kind.COMPLETION,
            model=model.id,
            params=self.sampling(
                model,
                DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
                logprobs=self.logprobs,
                prompt_logprobs=self._likeliest_in_prompt(),
            ),
            payload=payload | ({"echo": True} if self.echo else {}) | self.truncation,
            reply=self.reply_fields(model, choices, logprobs=self.logprobs, echo=bool(self.echo)),
            cls=self.work_class,
            n=n,
            choices=choices,
        )

    def _likeliest_in_prompt(self) -> int | None:
        """How many of the likeliest tokens are needed for each of the prompt's; an echo has logprobs too."""
        wanted = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((count for count in wanted if count is not None), default=None)
