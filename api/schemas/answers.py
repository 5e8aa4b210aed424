"""The bodies of answers, for the description at `/openapi.json` alone: answers are put together from bytes.

Nothing may be in an answer that is not here; `tests` hold real answers against these shapes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
#: Unix seconds.
Moment = Annotated[int, Field(ge=0)]
Index = Annotated[int, Field(ge=0)]
#: The stop string or the token id that ended a choice; null for an end id of the model, or the length.
StopReason = str | int | None
FinishReason = Literal["stop", "length"]


class Shape(BaseModel):
    """Base of all of them: complete, so nothing else may be there."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ErrorObject(Shape):
    """What went wrong."""

    message: Annotated[str, Field(min_length=1)]
    """A sentence for people."""
    type: str
    """The kind of fault: whose it is."""
    param: str | None
    """The field or header that is wrong."""
    code: str | None
    """What a program can tell errors apart by."""


class Error(Shape):
    """Any failure, whatever its status."""

    error: ErrorObject


class PromptDetails(Shape):
    """Where the prompt's tokens came from."""

    cached_tokens: Count


class CompletionDetails(Shape):
    """What the answer's tokens were."""

    reasoning_tokens: Count


class Usage(Shape):
    """Tokens, of all choices together; a prompt counts once."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TopLogprob(Shape):
    """A token that was likely at some place."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    """Log probabilities, token by token."""

    content: list[TokenLogprob] | None
    refusal: None


class CompletionLogprobs(Shape):
    """Log probabilities, token by token, each list as long as the others."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[Count]


class PromptLogprob(Shape):
    """A token at some place of the prompt, as vLLM tells it."""

    logprob: float
    rank: Annotated[int, Field(ge=1)] = 1
    """Left out where it is not known: of a token that was not among the likeliest."""
    decoded_token: str


#: By token id; null for the first token, which nothing precedes.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class AssistantMessage(Shape):
    """The assistant's next message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    """With `--reasoning-parser` only."""


class Delta(Shape):
    """What is new of a message; empty with the last chunk of a choice."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    """With `--reasoning-parser` only."""


class ChatChoice(Shape):
    """One sample."""

    index: Index
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason


class ChatChunkChoice(Shape):
    """What is new of one sample."""

    index: Index
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason = None
    """With the last chunk of a choice only."""


class CompletionChoice(Shape):
    """One sample of one prompt."""

    index: Index
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason
    prompt_logprobs: PromptLogprobs | None = None
    """When asked for."""


class CompletionChunkChoice(Shape):
    """What is new of one sample."""

    index: Index
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason = None
    """With the last chunk of a choice only."""


class _Generation(Shape):
    """What all objects of one answer share."""

    id: str
    created: Moment
    model: str
    """The name that was asked for."""
    system_fingerprint: str
    service_tier: Literal["default", "flex"] | None = None
    """When asked for one."""


class ChatCompletion(_Generation):
    """A whole answer."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    """When asked for."""


class ChatCompletionChunk(_Generation):
    """One event of a streamed answer; the last has no choices, and the usage if that was asked for."""

    object: Literal["chat.completion.chunk"]
    choices: Annotated[list[ChatChunkChoice], Field(max_length=1)]
    usage: Usage | None = None
    """In every chunk when asked for, but null in all except the last."""


class Completion(_Generation):
    """A whole answer."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(_Generation):
    """One event of a streamed answer; the last has no choices, and the usage if that was asked for."""

    object: Literal["text_completion"]
    choices: Annotated[list[CompletionChunkChoice], Field(max_length=1)]
    usage: Usage | None = None
    """In every chunk when asked for, but null in all except the last."""


class GenerationStatus(Shape):
    """Where a generation is."""

    id: str
    object: Literal["request"]
    label: str | None
    """The client's own name for it."""
    model: str
    work_class: Annotated[Literal["interactive", "batch"], Field(alias="class")]
    state: Literal["queued", "waiting", "running", "ended"]
    """`waiting` is for a scheduler."""
    created: Moment
    started: Moment | None
    ended: Moment | None
    attempts: Count
    """Crashes of workers on it."""
    choices: Count
    usage: Usage
    error: ErrorObject | None
    response: ChatCompletion | Completion | None
    """The whole answer, also of a stream; null until the end."""


class Model(Shape):
    """A model under one of its names."""

    id: str
    object: Literal["model"]
    created: Moment
    owned_by: str
    root: str
    """Its first name."""
    parent: None
    max_model_len: Annotated[int, Field(ge=1)]


class ModelList(Shape):
    """All that is served."""

    object: Literal["list"]
    data: list[Model]


class Tokens(Shape):
    """Token ids of a text or a conversation."""

    count: Count
    max_model_len: Annotated[int, Field(ge=1)]
    tokens: list[Index]
    token_strs: list[str] | None = None
    """When asked for."""


class DetokenizedText(Shape):
    """The text of token ids."""

    prompt: str


class Health(Shape):
    """The process lives."""

    status: Literal["ok"]


class Ready(Shape):
    """Whether a request sent now would be served, and if not, why."""

    ready: bool
    reasons: list[str]


class Version(Shape):
    """The server's version."""

    version: str


ANSWERS: tuple[type[Shape], ...] = (
    *(Error, ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk, GenerationStatus),
    *(Model, ModelList, Tokens, DetokenizedText, Health, Ready, Version),
)
