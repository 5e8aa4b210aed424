"""`POST /v1/chat/completions`: the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator

from api.schemas import unsupported
from api.schemas.common import GENERATION_RULES, MAX_LOGPROBS, Flag, GenerationFields, only_with
from api.schemas.messages import Messages, chat_payload
from common import messages as bus
from common.bus.registry import ModelInfo
from common.errors import InvalidRequestError

_COUNT_MAX = 2**31 - 1


class ChatRequest(GenerationFields):
    """A conversation to be continued by the assistant."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                *GENERATION_RULES,
                only_with("top_logprobs", {"type": "integer", "minimum": 1}, "logprobs"),
            ]
        }
    )

    messages: Messages
    """The conversation. Content is text, or parts of type text (joined by line feeds if the model's
    template takes text only); only an assistant's may be null.
    """
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1, le=_COUNT_MAX)] | None = None
    """Wins over `max_tokens`, which is its older name."""
    logprobs: Flag | None = None
    """Tell how likely each token of the answer was. Left out: false."""
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = None
    """With `logprobs` only: so many of the likeliest tokens beside each one. Left out: 0."""
    add_generation_prompt: Flag | None = None
    """Begin a new assistant message. Left out: true, unless the last one is continued."""
    continue_final_message: Flag | None = None
    """Continue the last message, which is then an assistant's; not together with `add_generation_prompt`.
    Left out: false.
    """
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template; they cannot replace it. Left out: `--default-chat-template-kwargs`."""
    include_reasoning: Flag | None = None
    """False leaves reasoning out of the answer. Left out: true."""
    separate_reasoning: Flag | None = None
    """False leaves reasoning in the content, as the model wrote it. Left out: true."""
    reasoning_effort: Annotated[str, Field(strict=True, max_length=64)] | None = None
    """A variable for the chat template."""

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs is only allowed when logprobs is true.", param="top_logprobs"
            )
        return self

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ChatRequest:
        """The request in ``body``; raises pydantic's ValidationError or `InvalidRequestError`."""
        unsupported.refuse(body, unsupported.CHAT)
        return cls.model_validate(body)

    def to_request(self, model: ModelInfo) -> bus.Request:
        """The request for the bus, without a uid; no limit on tokens means the rest of the context."""
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
        n, logprobs = self.n or 1, self.top_logprobs or 0 if self.logprobs else None
        return bus.Request(
            uid="",
            kind=bus.Kind.CHAT,
            model=model.id,
            params=self.sampling(
                model,
                self.max_completion_tokens or self.max_tokens,
                logprobs=logprobs,
                prompt_logprobs=self.prompt_logprobs,
            ),
            payload=chat_payload(
                self.messages,
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
                chat_template_kwargs=kwargs,
                add_special_tokens=self.add_special_tokens,
            )
            | self.truncation,
            reply=self.reply_fields(model, n, logprobs=logprobs),
            cls=self.work_class,
            n=n,
            choices=n,
        )
