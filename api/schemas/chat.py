"""`POST /v1/chat/completions`: the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from api.schemas import unsupported
from api.schemas.common import Flag, GenerationFields
from api.schemas.messages import Messages, chat_payload
from common import messages as bus
from common.bus.registry import ModelInfo

_COUNT_MAX = 2**31 - 1


class ChatRequest(GenerationFields):
    """A conversation to be continued by the assistant."""

    messages: Messages
    """The conversation. Content is text, or parts of type text (joined by line feeds if the model's
    template takes text only); only an assistant's may be null.
    """
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1, le=_COUNT_MAX)] | None = None
    """Wins over `max_tokens`, which is its older name."""
    add_generation_prompt: Flag | None = None
    """Begin a new assistant message. Left out: true, unless the last one is continued."""
    continue_final_message: Flag | None = None
    """Continue the last message, which is then an assistant's; not together with `add_generation_prompt`.
    Left out: false.
    """
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template; they cannot replace it."""
    reasoning_effort: Annotated[str, Field(strict=True, max_length=64)] | None = None
    """A variable for the chat template."""

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
        n = self.n or 1
        return bus.Request(
            uid="",
            kind=bus.Kind.CHAT,
            model=model.id,
            params=self.sampling(model, self.max_completion_tokens or self.max_tokens),
            payload=chat_payload(
                self.messages,
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
                chat_template_kwargs=kwargs,
                add_special_tokens=self.add_special_tokens,
            ),
            reply=self.reply_fields(model, n),
            cls=self.work_class,
            n=n,
            choices=n,
        )
