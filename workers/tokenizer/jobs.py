"""What the tokenizer process does with one request: render, encode, check. Pure; knows no Redis.

Fields have the names and meanings of the HTTP API, which has checked their shapes; what only the model's
tokenizer, template and limits can tell is checked here. Faults of the request raise `InvalidRequestError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from common.errors import ContextLengthError, InvalidRequestError
from common.messages import Kind, Request, dumps
from common.sampling import MAX_PROMPT_LOGPROBS, SamplingParams
from workers.text.chat import ChatTemplate
from workers.text.codec import TokenCodec
from workers.text.echo import write_echo
from workers.text.literal import LiteralText

#: Most prompts of one completion request.
MAX_PROMPTS = 1024
#: Texts of fewer characters per token of context are encoded whole, to say exactly how long they are.
_CHARS_PER_TOKEN = 32
#: /tokenize takes texts of this many context lengths.
_COUNTABLE_CONTEXTS = 8
#: Tokens that cutting a text in two may add at most.
_CUT_SLACK = 64


@dataclass(frozen=True, slots=True)
class _Room:
    """How many tokens the model takes, and how many of them a prompt may have."""

    context: int
    prompt: int


class _Encode(Protocol):
    """Text to token ids: with control tokens, or with some of them as text."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


class Jobs:
    """Does jobs for one model.

    With ``literal_special_tokens`` what spells a control token in messages stays text; without, it becomes
    the token, as it always does in the prompts of completions. ``template_kwargs`` stand in for what a
    request's `chat_template_kwargs` leave out.
    """

    def __init__(
        self,
        codec: TokenCodec,
        template: ChatTemplate,
        vocab_size: int,
        *,
        literal_special_tokens: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._codec = codec
        self._template = template
        #: Rows of the model's vocabulary: ids from 0 to one less are valid, with or without a token.
        self._vocab_size = vocab_size
        self._template_kwargs = dict(template_kwargs or {})
        self._literal = LiteralText(codec) if literal_special_tokens else None

    def work(self, request: Request, max_model_len: int) -> tuple[list[list[int]], str]:
        """Do one job: (prompts, echo) for the engine, in the order of the request, or ([], JSON answer).

        The echo is `workers.text.echo`'s, or empty if none was asked for.
        ``max_model_len`` bounds prompt and completion together, so a prompt must leave room for one token;
        except to score it (max_tokens 0), which generates nothing.
        """
        payload = request.payload
        if request.kind is Kind.TOKENIZE:
            return [], dumps(self._tokenize(payload, max_model_len))
        if request.kind is Kind.DETOKENIZE:
            ids = self._ids(payload.get("tokens"), "tokens")
            return [], dumps({"prompt": self._codec.decode(ids, skip_special_tokens=False)})
        self._check_params(request.params)
        room = _Room(max_model_len, max_model_len - (0 if request.params.max_tokens == 0 else 1))
        keep = _kept(payload, room)
        # What is cut to fit need not fit before; the bound is that of /tokenize.
        whole = room if keep is None else _countable(max_model_len)
        if request.kind is Kind.CHAT:
            ids = _checked(_last(self._chat(payload, whole), keep), room, "messages")
            _check_scores(request, [ids])
            return [ids], ""
        prompts = _as_prompts(payload.get("prompt"))
        encoded = self._prompts(prompts, payload, whole)
        kept = [_checked(_last(ids, keep), room, "prompt") for ids in encoded]
        _check_scores(request, kept)
        if not _flag(payload, "echo", False):
            return kept, ""
        shown = [
            prompt if len(some) == len(ids) else some
            for prompt, some, ids in zip(prompts, kept, encoded, strict=True)
        ]
        return kept, write_echo(self._codec, shown, kept)

    def _chat(self, payload: Mapping[str, Any], room: _Room) -> list[int]:
        messages, tools, kwargs = (
            payload.get(name) for name in ("messages", "tools", "chat_template_kwargs")
        )
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise InvalidRequestError("chat_template_kwargs must be an object", param="chat_template_kwargs")
        kwargs = self._template_kwargs | dict(kwargs or {})
        encode: _Encode = self._codec.encode
        if self._literal is not None:
            messages, tools, kwargs = self._literal.mark([messages, tools, kwargs])
            encode = self._literal.encode
        continued = _flag(payload, "continue_final_message", False)
        text = self._template.render(
            messages,
            add_generation_prompt=_flag(payload, "add_generation_prompt", not continued),
            continue_final_message=continued,
            tools=tools,
            kwargs=kwargs,
        )
        special = _flag(payload, "add_special_tokens", False)  # the template writes them itself
        return _encode_within(encode, text, special, room, "messages")

    def _prompts(self, prompts: Sequence[Any], payload: Mapping[str, Any], room: _Room) -> list[list[int]]:
        if len(prompts) > MAX_PROMPTS:
            raise InvalidRequestError(f"prompt has more than {MAX_PROMPTS} items", param="prompt")
        special = _flag(payload, "add_special_tokens", True)
        return [
            _encode_within(self._codec.encode, prompt, special, room, "prompt")
            if isinstance(prompt, str)
            else self._ids(prompt, "prompt")
            for prompt in prompts
        ]

    def _tokenize(self, payload: Mapping[str, Any], max_model_len: int) -> dict[str, Any]:
        room = _countable(max_model_len)
        if payload.get("messages") is not None:
            ids = self._chat(payload, room)
        else:
            prompt = payload.get("prompt")
            if not isinstance(prompt, str):
                raise InvalidRequestError("prompt must be a string", param="prompt")
            special = _flag(payload, "add_special_tokens", True)
            ids = _encode_within(self._codec.encode, prompt, special, room, "prompt")
        answer = {"count": len(ids), "max_model_len": max_model_len, "tokens": ids}
        if payload.get("return_token_strs"):
            answer["token_strs"] = [self._codec.token_spelling(token) for token in ids]
        return answer

    def _check_params(self, params: SamplingParams) -> None:
        for token, _ in params.logit_bias:
            self._check_id(token, "logit_bias")
        for token in params.stop_token_ids:
            self._check_id(token, "stop_token_ids")

    def _ids(self, value: Any, param: str) -> list[int]:
        if not isinstance(value, list | tuple):
            raise InvalidRequestError(f"{param} must be a list of token ids", param=param)
        for token in value:
            self._check_id(token, param)
        return list(value)

    def _check_id(self, token: Any, param: str) -> None:
        if isinstance(token, bool) or not isinstance(token, int):
            raise InvalidRequestError(f"{param} holds {token!r:.40}, which is no token id", param=param)
        if not 0 <= token < self._vocab_size:
            raise InvalidRequestError(
                f"{param} holds the token id {token}; this model's are 0 to {self._vocab_size - 1}",
                param=param,
            )


def _countable(max_model_len: int) -> _Room:
    """For what need not fit; it is bounded only to keep one caller from taking all the time."""
    return _Room(max_model_len, _COUNTABLE_CONTEXTS * max_model_len)


def _kept(payload: Mapping[str, Any], room: _Room) -> int | None:
    """How many of a prompt's last tokens to keep; None for all of them."""
    keep = payload.get("truncate_prompt_tokens")
    if keep is None:
        return None
    if isinstance(keep, bool) or not isinstance(keep, int) or not -1 <= keep <= room.context:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be a whole number from -1 to {room.context}",
            param="truncate_prompt_tokens",
        )
    return room.prompt if keep == -1 else keep


def _last(ids: list[int], keep: int | None) -> list[int]:
    return ids if keep is None or len(ids) <= keep else ids[len(ids) - keep :]


def _encode_within(
    encode: _Encode, text: str, add_special_tokens: bool, room: _Room, param: str
) -> list[int]:
    """Encode a text without spending more on a giant one than on the longest that fits.

    A giant text is encoded in a prefix that doubles until it alone is too long.
    """
    size = _CHARS_PER_TOKEN * room.prompt
    while size < len(text):
        ids = encode(text[:size], add_special_tokens=add_special_tokens)
        if len(ids) > room.prompt + _CUT_SLACK:
            raise _too_long(len(ids), room, param, at_least=True)
        size *= 2
    return encode(text, add_special_tokens=add_special_tokens)


def _checked(ids: list[int], room: _Room, param: str) -> list[int]:
    if not ids:
        raise InvalidRequestError(f"{param} must not be empty", param=param)
    if len(ids) > room.prompt:
        raise _too_long(len(ids), room, param)
    return ids


def _check_scores(request: Request, prompts: Sequence[Sequence[int]]) -> None:
    """Refuses a request whose prompts would bring more logprobs than one reply may hold of them."""
    tokens = sum(map(len, prompts))
    scores = request.params.scores(tokens, request.n)
    if scores > MAX_PROMPT_LOGPROBS:
        param = "prompt_logprobs" if "prompt_logprobs" in request.reply else "logprobs"
        raise InvalidRequestError(
            f"At most {MAX_PROMPT_LOGPROBS} logprobs of prompts are given. However, its {tokens} tokens and "
            f"the likeliest beside each have {scores}, n included. Please reduce {param}, n or the "
            "prompt.",
            param=param,
        )


def _too_long(count: int, room: _Room, param: str, *, at_least: bool = False) -> ContextLengthError:
    number = f"at least {count}" if at_least else str(count)
    completion = ", which leaves no room for a completion" if count == room.context else ""
    return ContextLengthError(
        f"This model's maximum context length is {room.context} tokens. However, your {param} resulted in "
        f"{number} tokens{completion}. Please reduce the length of the {param}.",
        param=param,
    )


def _flag(payload: Mapping[str, Any], name: str, default: bool) -> bool:
    """A boolean field; null means its default."""
    value = payload.get(name)
    return default if value is None else bool(value)


def _as_prompts(prompt: Any) -> Sequence[Any]:
    """One prompt or several: a text, a list of ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list | tuple):
        raise InvalidRequestError("prompt must be a string or a list", param="prompt")
    if not prompt:
        raise InvalidRequestError("prompt must not be empty", param="prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt
