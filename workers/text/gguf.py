"""Builds a tokenizer from the metadata of a GGUF file, which holds vocabulary, merges and flags but no code.

How text is split before merging is only named there (``tokenizer.ggml.pre``); what the names mean is the
table below. Byte-level BPE ("gpt2") and SentencePiece BPE with byte fallback ("llama") are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from workers.checkpoint.errors import CheckpointError

_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",  # spelled so in the format
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_TEMPLATE_KEY = "tokenizer.chat_template"


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Split:
    """How a byte-level vocabulary cuts text into words before merging."""

    #: None is GPT-2's own pattern, which the byte-level pre-tokenizer has built in.
    pattern: str | None = None
    #: Every digit is a word of its own.
    digits: bool = False
    #: Text is composed (NFC) first.
    compose: bool = False
    #: A word that is a token is taken whole, merges or not.
    ignore_merges: bool = False
    #: Whether a beginning-of-text token is added where the file does not say.
    add_bos: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_REST}"
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_CASED_REST}"
)

_SPLITS: dict[str, _Split] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "gigachat"), _Split()),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _Split(digits=True)
    ),
    "command-r": _Split(digits=True, compose=True),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"),
        _Split(_LLAMA3, ignore_merges=True, add_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Split(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _Split(_QWEN2, compose=True)),
    "stablelm2": _Split(_QWEN2),
    "tekken": _Split(_TEKKEN, ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _Split(_GPT4O)),
}


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer a GGUF file describes; raises `CheckpointError` when its kind is not known."""
    model = metadata.get("tokenizer.ggml.model")
    builders: dict[Any, Callable[[Mapping[str, Any]], Tokenizer]] = {
        "gpt2": _byte_level,
        "llama": _sentencepiece,
    }
    if model not in builders:
        raise CheckpointError(f"the GGUF tokenizer model {model!r} is not supported ({', '.join(builders)})")
    tokenizer = builders[model](metadata)
    kinds = list(zip(_tokens(metadata), _types(metadata), strict=True))
    control = [text for text, kind in kinds if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    plain = [text for text, kind in kinds if kind == TokenType.USER_DEFINED]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    _add_template_tokens(tokenizer, metadata)
    return tokenizer


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by role."""
    tokens = _tokens(metadata)
    ids = {role: metadata.get(key) for role, key in _KEYS.items()}
    return {
        role: tokens[token_id]
        for role, token_id in ids.items()
        if isinstance(token_id, int) and 0 <= token_id < len(tokens)
    }


def chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: the plain key is the default one, others have their name appended to it."""
    templates: dict[str, str] = {}
    for key, value in metadata.items():
        if key == _TEMPLATE_KEY:
            templates["default"] = str(value)
        elif key.startswith(f"{_TEMPLATE_KEY}."):
            templates[key.removeprefix(f"{_TEMPLATE_KEY}.")] = str(value)
    return templates


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError("the GGUF file holds no vocabulary")
    return tokens


def _types(metadata: Mapping[str, Any]) -> list[int]:
    tokens = _tokens(metadata)
    types = metadata.get("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError("the GGUF file does not give one type for each token of its vocabulary")
    return types


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    split = _SPLITS.get(name)
    if split is None:
        known = ", ".join(sorted(_SPLITS))
        raise CheckpointError(f"the GGUF pre-tokenizer {name!r} is not supported (supported: {known})")
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise CheckpointError("the GGUF file holds no merges for its byte-level vocabulary")
    vocab = {text: token_id for token_id, text in enumerate(_tokens(metadata))}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    try:
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=split.ignore_merges)
    except Exception as error:  # the library raises bare Exception for a merge of unknown tokens
        raise CheckpointError(f"the GGUF file's merges do not fit its vocabulary: {error}") from error
    tokenizer = Tokenizer(model)
    if split.compose:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens = _tokens(metadata)
    vocab = {text: token_id for token_id, text in enumerate(tokens)}
    unknown = special_tokens(metadata).get("unk_token")
    model = models.BPE(
        vocab=vocab, merges=_merges_of(metadata, vocab), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    # The space before the first word is put before every stretch of text between control tokens, as the
    # format's reference implementation does, and as the Llama 2 family was trained.
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(content=" ", left=1)] if prefix else undo)
    return tokenizer


def _merges_of(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result scores best: every way to cut a token, best tokens first."""
    scores, types = metadata.get("tokenizer.ggml.scores"), _types(metadata)
    if not isinstance(scores, list) or len(scores) != len(types):
        raise CheckpointError("the GGUF file does not give one score for each token of its vocabulary")
    pairs: list[tuple[float, int, str, str]] = []
    for text, token_id in vocab.items():
        if types[token_id] != TokenType.NORMAL:
            continue
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocab and right in vocab:
                pairs.append((-scores[token_id], token_id, left, right))
    pairs.sort(key=lambda pair: pair[:2])
    return [(left, right) for _, _, left, right in pairs]


def _add_template_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Have the encoder put beginning- and end-of-text tokens around a text, where the file says so."""
    byte_level = metadata.get("tokenizer.ggml.model") == "gpt2"
    default = _SPLITS[metadata.get("tokenizer.ggml.pre", "default")].add_bos if byte_level else True
    special = special_tokens(metadata)
    bos = special.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", default) else None
    eos = special.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    around = [token for token in (bos, eos) if token is not None]
    if around:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(around)],
        )
