"""How the next token is chosen and when a generation ends: the sampling part of a request.

One frozen value travels unchanged from the API through Redis to the engine and the detokenizer.
Ranges are validated where users are (the API); here the values are taken as right.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import orjson

SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
#: Most logprobs that one request may ask for of its prompts (`SamplingParams.scores`): some 8 MB in Redis.
#: They come with the prompt, at once, where those of generated tokens take the time to generate them.
MAX_PROMPT_LOGPROBS = 1 << 18


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request, shared by all its choices.

    Source: the OpenAI request fields of the same names, and vLLM's extensions
    (``top_k``, ``min_p``, ``repetition_penalty``, ``stop_token_ids``, ``min_tokens``, ...).
    """

    #: Most tokens to generate; None means "up to the context length".
    max_tokens: int | None = None
    #: End ids and stop token ids are masked until this many tokens were generated.
    min_tokens: int = 0
    #: 0 is exact argmax, whatever top_p and top_k say.
    temperature: float = 1.0
    top_p: float = 1.0
    #: 0 is off.
    top_k: int = 0
    #: Drops tokens less likely than ``min_p`` times the likeliest, after temperature. 0 is off.
    min_p: float = 0.0
    #: Presence and frequency penalties count output tokens only; repetition counts prompt and output.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    #: (token id, bias) pairs, added to the raw logits, before penalties and temperature.
    logit_bias: tuple[tuple[int, float], ...] = ()
    #: Seed of the request, always set (drawn by the API when the user gave none); see `choice_seed`.
    seed: int = 0
    #: Stop strings, matched on decoded output text by the detokenizer.
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    #: Go on past the model's own end ids; stop strings and stop token ids still stop.
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    #: How many of the likeliest tokens to report beside each one generated; 0 reports that one alone, None
    #: nothing. Of the raw distribution: before biases, penalties and temperature.
    logprobs: int | None = None
    #: The same for the tokens of the prompt, the first of which has none.
    prompt_logprobs: int | None = None

    def choice_seed(self, sample: int) -> int:
        """Seed of the ``sample``-th sample (0 to n-1) of one prompt, as a signed 64-bit number."""
        return (self.seed + sample + 2**63) % 2**64 - 2**63

    def scores(self, tokens: int, n: int) -> int:
        """Logprobs of prompts of so many ``tokens`` in all, ``n`` samples of each; rivals count too."""
        return 0 if self.prompt_logprobs is None else tokens * n * (self.prompt_logprobs + 1)

    def to_json(self) -> str:
        """Readable text for the request hash; fields at their default are left out."""
        return orjson.dumps(
            {name: value for name in _DEFAULTS if (value := getattr(self, name)) != _DEFAULTS[name]}
        ).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> SamplingParams:
        """Inverse of `to_json`. Fields of a newer version are ignored (B10)."""
        raw: dict[str, Any] = orjson.loads(text)
        known = {name: raw[name] for name in _DEFAULTS if name in raw}
        for name in ("stop", "stop_token_ids"):
            if name in known:
                known[name] = tuple(known[name])
        if "logit_bias" in known:
            known["logit_bias"] = tuple((int(token), float(bias)) for token, bias in known["logit_bias"])
        return cls(**known)


_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(SamplingParams)}
