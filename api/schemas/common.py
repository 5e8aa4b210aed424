"""What chat and completion requests have in common: sampling, stopping, streaming.

Types are strict (true is not 1, "1" is not 1), numbers finite, everything bounded. Knows no HTTP.
"""

from __future__ import annotations

import functools
import hashlib
import math
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from api.schemas.client import ClientFields
from common.bus.keys import BATCH, INTERACTIVE
from common.bus.registry import ModelInfo
from common.errors import InvalidRequestError
from common.sampling import SEED_MAX, SEED_MIN, SamplingParams

MAX_STOPS, MAX_STOP_LENGTH = 32, 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_SAMPLES = 128
#: Likeliest tokens that a logprob may come with.
MAX_LOGPROBS = 20
#: Choices of one request: prompts times samples.
MAX_CHOICES = 1024
COUNT_MAX = 2**31 - 1
#: Below this a temperature is 0: exact argmax.
_COLD = 1e-5

Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
ModelName = Annotated[str, Field(strict=True, min_length=1, max_length=512)]
TokenIds = Annotated[list[Annotated[int, Field(strict=True, ge=0)]], Field(max_length=MAX_STOP_TOKEN_IDS)]


_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_StopStrings = _StopString | Annotated[list[_StopString], Field(max_length=MAX_STOPS)] | None
#: Pydantic would allow other names beside those that a pattern asks for.
_LogitBias = Annotated[
    dict[str, float],
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIAS,
        }
    ),
]


def _number(*, ge: float, le: float) -> Any:
    return Field(strict=True, allow_inf_nan=False, ge=ge, le=le)


def _stop_strings(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("stop_type", "Input should be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise PydanticCustomError("stop_count", "There may be at most {limit} strings", {"limit": MAX_STOPS})
    if not all(stops):
        raise PydanticCustomError("stop_empty", "A stop string must not be empty")
    if any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise PydanticCustomError(
            "stop_length", "A stop string may have at most {limit} characters", {"limit": MAX_STOP_LENGTH}
        )
    return tuple(stops)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias_type", "Input should be an object of token ids and numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise PydanticCustomError(
            "logit_bias_count", "There may be at most {limit} entries", {"limit": MAX_LOGIT_BIAS}
        )
    return tuple((_bias_token(token), _bias(bias)) for token, bias in value.items())


def _bias_token(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise PydanticCustomError("logit_bias_key", "Keys should be token ids, written as whole numbers")
    return int(key)


def _bias(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not -100 <= value <= 100:
        raise PydanticCustomError("logit_bias_value", "Values should be numbers from -100 to 100")
    return float(value)


class Schema(BaseModel):
    """Base of all request shapes: unknown fields are ignored, as clients send many."""

    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True)


class StreamOptions(Schema):
    """The `stream_options` object; `include_obfuscation` is accepted, and there is none."""

    include_usage: Flag | None = None
    """A last chunk with the usage. Left out: false."""
    continuous_usage_stats: Flag | None = None
    """With `include_usage`: the usage so far in every chunk. Left out: false."""
    include_obfuscation: Flag | None = None
    """Accepted; there is none."""


def only_with(name: str, asked: JsonDict, other: str) -> JsonDict:
    """A rule of two fields as a JSON schema: if ``name`` is as ``asked`` says, then ``other`` is true."""
    return {
        "if": {"properties": {name: asked}, "required": [name]},
        "then": {"properties": {other: {"const": True}}, "required": [other]},
    }


#: What `GenerationFields` checks of two fields together.
GENERATION_RULES: tuple[JsonDict, ...] = (
    only_with("stream_options", {"type": "object"}, "stream"),
    {
        "if": {"properties": {"prompt_logprobs": {"type": "integer"}}, "required": ["prompt_logprobs"]},
        "then": {"properties": {"stream": {"enum": [False, None]}}},
    },
)


class GenerationFields(ClientFields):
    """Fields of both generation endpoints. None stands for "left out" as well as for null."""

    model: ModelName
    """An id or alias of `/v1/models`; the answer repeats the name."""
    stream: Flag | None = None
    """Server-sent events. Left out: false."""
    stream_options: StreamOptions | None = None
    """Only together with `stream`: `include_usage` adds a last chunk with the usage,
    `continuous_usage_stats` puts it into each.
    """
    n: Annotated[int, _number(ge=1, le=MAX_SAMPLES)] | None = None
    """Samples of every prompt; prompts times `n` are at most 1024. Left out: 1."""
    max_tokens: Annotated[int, _number(ge=1, le=COUNT_MAX)] | None = None
    """Most tokens to generate; cut to the room that is left. Left out: the rest of the context (chat), 16
    (completions).
    """
    min_tokens: Annotated[int, _number(ge=0, le=COUNT_MAX)] | None = None
    """End ids and stop ids are masked until then; at most `max_tokens`. Left out: 0."""
    temperature: Annotated[float, _number(ge=0, le=2)] | None = None
    """0 is exact argmax. Left out: the model's own, else 1."""
    top_p: Annotated[float, _number(ge=0, le=1)] | None = None
    """0 means greedy. Left out: the model's own, else 1."""
    top_k: Annotated[int, _number(ge=-1, le=SEED_MAX)] | None = None
    """0 and -1 are off. Left out: the model's own, else off."""
    min_p: Annotated[float, _number(ge=0, le=1)] | None = None
    """A share of the likeliest token's probability, after temperature. Left out: the model's own, else 0."""
    presence_penalty: Annotated[float, _number(ge=-2, le=2)] | None = None
    """Over output tokens. Left out: 0."""
    frequency_penalty: Annotated[float, _number(ge=-2, le=2)] | None = None
    """Over output tokens. Left out: 0."""
    repetition_penalty: Annotated[float, _number(ge=0.01, le=100)] | None = (
        None  # beyond, logits could overflow
    )
    """Over prompt and output. Left out: the model's own, else 1."""
    logit_bias: Annotated[
        tuple[tuple[int, float], ...],
        PlainValidator(_logit_bias, json_schema_input_type=_LogitBias | None),
    ] = ()
    """Token ids to what is added to their logits, -100 to 100; at most 1024 of them."""
    prompt_logprobs: Annotated[int, _number(ge=0, le=MAX_LOGPROBS)] | None = None
    """So many of the likeliest tokens for each one of the prompt; not with `stream`. Left out: none."""
    seed: Annotated[int, _number(ge=SEED_MIN, le=SEED_MAX)] | None = None
    """Sample j uses `seed + j`. Left out: drawn."""
    stop: Annotated[tuple[str, ...], PlainValidator(_stop_strings, json_schema_input_type=_StopStrings)] = ()
    """Up to 32 strings of 1 to 1024 characters, matched in the text across tokens, and not returned."""
    stop_token_ids: TokenIds | None = None
    """Ids that end a choice like the model's own end ids."""
    include_stop_str_in_output: Flag | None = None
    """Return the stop string as well. Left out: false."""
    ignore_eos: Flag | None = None
    """Go on past the model's own end ids. Left out: false."""
    skip_special_tokens: Flag | None = None
    """Leave special tokens out of the text. Left out: true."""
    add_special_tokens: Flag | None = None
    """Let the tokenizer add its own. Left out: false (chat), true (completions)."""
    truncate_prompt_tokens: Annotated[int, _number(ge=-1, le=COUNT_MAX)] | None = None
    """Keep so many of the prompt's last tokens; -1: as many as leave room for one more. Left out: all."""
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    """`flex` is batch work: it runs in idle capacity and gives way to all other requests within a step or
    two. All others are the same: interactive, as when left out.
    """

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options is only allowed when stream is true.", param="stream_options"
            )
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_come_in_one_piece(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError(
                "prompt_logprobs are not available when stream is true.", param="prompt_logprobs"
            )
        return self

    @property
    def work_class(self) -> str:
        """The class of work: `flex` is OpenAI's cheaper and slower tier, all others are served at once."""
        return BATCH if self.service_tier == "flex" else INTERACTIVE

    @property
    def truncation(self) -> dict[str, int]:
        """What of the tokenizer's input says how much of the prompt is kept; empty for all of it."""
        kept = self.truncate_prompt_tokens
        return {} if kept is None else {"truncate_prompt_tokens": kept}

    def sampling(
        self,
        model: ModelInfo,
        max_tokens: int | None,
        *,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        """Sampling parameters for ``model``, whose own defaults stand in for what was left out."""
        if max_tokens is not None and (self.min_tokens or 0) > max_tokens:
            raise InvalidRequestError("min_tokens must not be greater than max_tokens.", param="min_tokens")
        check_token_ids(self.stop_token_ids or (), model, "stop_token_ids")
        check_token_ids([token for token, _ in self.logit_bias], model, "logit_bias")
        defaults = model.generation_defaults
        temperature = _either(self.temperature, defaults.get("temperature"), 1.0)
        top_p = _either(self.top_p, defaults.get("top_p"), 1.0)
        top_k = _either(self.top_k, defaults.get("top_k"), 0)
        return SamplingParams(
            max_tokens=_capped(max_tokens, defaults.get("max_new_tokens")),
            min_tokens=self.min_tokens or 0,
            # A nucleus of nothing is meant as "only the best", which is what clients that send it expect.
            temperature=0.0 if temperature < _COLD or top_p == 0 else temperature,
            top_p=top_p or 1.0,
            top_k=int(top_k) if 0 < top_k < model.vocab_size else 0,
            min_p=_either(self.min_p, defaults.get("min_p"), 0.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=_either(self.repetition_penalty, defaults.get("repetition_penalty"), 1.0),
            logit_bias=self.logit_bias,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            stop=self.stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=self.skip_special_tokens is not False,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def reply_fields(
        self, model: ModelInfo, choices: int, *, logprobs: int | None, echo: bool = False
    ) -> dict[str, Any]:
        """What any API process needs to shape the answer: `Request.reply`; of extras, those asked for."""
        extras = {"logprobs": logprobs, "prompt_logprobs": self.prompt_logprobs, "echo": echo or None}
        options = self.stream_options or StreamOptions()
        return {
            "model": self.model,
            "created": int(time.time()),
            "fingerprint": fingerprint(model),
            "stream": bool(self.stream),
            "usage": bool(options.include_usage),
            "running_usage": bool(options.continuous_usage_stats),
            "choices": choices,
        } | {name: value for name, value in extras.items() if value is not None}


def _either(given: float | None, default: Any, fallback: float) -> float:
    if given is not None:
        return given
    return fallback if default is None else float(default)


def _capped(wanted: int | None, most: Any) -> int | None:
    """``most``, the model's own bound if any, stands in for what was left out, and is never exceeded."""
    if most is None:
        return wanted
    return int(most) if wanted is None else min(wanted, int(most))


def check_token_ids(ids: Sequence[int], model: ModelInfo, param: str) -> None:
    """Refuses ids that are not in the vocabulary of ``model``: they would reach the engine's tables."""
    if ids and not 0 <= min(ids) <= max(ids) < model.vocab_size:
        raise InvalidRequestError(
            f"{param}: token ids must be from 0 to {model.vocab_size - 1} for this model.", param=param
        )


def fingerprint(model: ModelInfo) -> str:
    """`system_fingerprint`: the same on every replica that serves the same checkpoint."""
    return _fingerprint(f"{model.id} {model.created} {model.vocab_size}")


@functools.lru_cache(maxsize=64)
def _fingerprint(identity: str) -> str:
    return "fp_" + hashlib.sha256(identity.encode()).hexdigest()[:10]
