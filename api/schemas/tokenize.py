"""`POST /tokenize` and `/detokenize`: the requests, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from api.schemas import unsupported
from api.schemas.common import Flag, ModelName, Schema, Text, check_token_ids
from api.schemas.messages import Messages, chat_payload
from common import messages as bus
from common.bus.registry import ModelInfo
from common.errors import InvalidRequestError
from common.sampling import SamplingParams

_MAX_TOKENS = 1 << 20


#: `TokenizeRequest._one_input` as a JSON schema.
_ONE_INPUT: JsonDict = {
    "oneOf": [
        {"properties": {"prompt": {"type": "string"}}, "required": ["prompt"]},
        {"properties": {"messages": {"type": "array"}}, "required": ["messages"]},
    ]
}


class TokenizeRequest(Schema):
    """A text or a conversation to be turned into token ids. Without ``model``, the only one is meant."""

    model_config = ConfigDict(json_schema_extra=_ONE_INPUT)

    model: ModelName | None = None
    """An id or alias of `/v1/models`. Left out: the only model there is."""
    prompt: Text | None = None
    """A text; either this or `messages` is given."""
    messages: Messages | None = None
    """A conversation, as in a chat request."""
    add_special_tokens: Flag | None = None
    """Let the tokenizer add its own. Left out: true for a prompt, false for messages."""
    return_token_strs: Flag | None = None
    """The tokens as text, too. Left out: false."""
    add_generation_prompt: Flag | None = None
    """As in a chat request."""
    continue_final_message: Flag | None = None
    """As in a chat request."""
    chat_template_kwargs: dict[str, Any] | None = None
    """As in a chat request."""

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("Exactly one of prompt and messages must be given.", param="prompt")
        return self

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> TokenizeRequest:
        """The request in ``body``; raises pydantic's ValidationError or `InvalidRequestError`."""
        unsupported.refuse(body, unsupported.TOKENIZE)
        return cls.model_validate(body)

    def to_request(self, model: ModelInfo) -> bus.Request:
        """The request for the bus, without a uid."""
        if self.messages is None:
            payload = {"prompt": self.prompt, "add_special_tokens": self.add_special_tokens is not False}
        else:
            payload = chat_payload(
                self.messages,
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
                chat_template_kwargs=self.chat_template_kwargs,
                add_special_tokens=self.add_special_tokens,
            )
        payload["return_token_strs"] = bool(self.return_token_strs)
        return _request(bus.Kind.TOKENIZE, model, payload)


class DetokenizeRequest(Schema):
    """Token ids to be turned into text."""

    model: ModelName | None = None
    """An id or alias of `/v1/models`. Left out: the only model there is."""
    tokens: Annotated[list[Annotated[int, Field(strict=True)]], Field(max_length=_MAX_TOKENS)]
    """Token ids."""

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> DetokenizeRequest:
        """The request in ``body``; raises pydantic's ValidationError."""
        return cls.model_validate(body)

    def to_request(self, model: ModelInfo) -> bus.Request:
        """The request for the bus, without a uid."""
        check_token_ids(self.tokens, model, "tokens")
        return _request(bus.Kind.DETOKENIZE, model, {"tokens": self.tokens})


def _request(kind: bus.Kind, model: ModelInfo, payload: dict[str, Any]) -> bus.Request:
    return bus.Request(uid="", kind=kind, model=model.id, params=SamplingParams(), payload=payload)
