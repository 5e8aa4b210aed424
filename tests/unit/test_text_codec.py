"""The codec: true bytes of tokens, encoding, and tokenizers from GGUF metadata and from folders."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from common.errors import InvalidRequestError
from tests.helpers.text import BUNDLED, bundled_codec, bundled_source, byte_codec
from workers.checkpoint import Checkpoint, CheckpointError, GGUFFile, Kind, locate
from workers.text import gguf
from workers.text.codec import TokenCodec
from workers.text.source import TextSource, load_source
from workers.text.vocabulary import byte_alphabet

CODEC = bundled_codec()
SAMPLE = 'Grüße, 日本語 🙂‍↔️ \t def f(x):\n    return "x" * 12345  # naïve   İstanbul ½ \u200b\r\n'


def test_the_bundled_model() -> None:
    assert (CODEC.vocab_size, CODEC.bos_id, CODEC.eos_id) == (49152, 1, 2)
    assert [CODEC.is_special(token) for token in (0, 2, 16, 17)] == [True, True, True, False]
    assert CODEC.token_bytes(2) == b"<|im_end|>"
    assert CODEC.token_bytes(10813) + CODEC.token_bytes(230) == b"\xf0\x9f\x8c"
    assert CODEC.token_spelling(905) == "Ġworld"


def test_bytes_of_tokens_are_the_bytes_of_the_text() -> None:
    ids = CODEC.encode(SAMPLE, add_special_tokens=True)
    assert b"".join(map(CODEC.token_bytes, ids)) == SAMPLE.encode()
    assert CODEC.decode(ids, skip_special_tokens=True) == SAMPLE


def test_batches_equal_single_texts() -> None:
    texts = [SAMPLE, "", "a", "<|im_end|>"]
    batch = CODEC.encode_batch(texts, add_special_tokens=False)
    assert batch == [CODEC.encode(each, add_special_tokens=False) for each in texts]
    assert batch[1:] == [[], CODEC.encode("a", add_special_tokens=False), [2]]


def test_control_tokens_as_text() -> None:
    ids = CODEC.encode_literally("a<|im_end|>b")
    assert 2 not in ids
    assert CODEC.decode(ids, skip_special_tokens=True) == "a<|im_end|>b"
    assert CODEC.encode("a<|im_end|>b", add_special_tokens=False)[1] == 2, "and only there"


@pytest.mark.parametrize("token", [-1, 49152, 2**40])
def test_ids_without_a_token(token: int) -> None:
    for ask in (CODEC.token_bytes, CODEC.token_spelling):
        with pytest.raises(InvalidRequestError, match=str(token)):
            ask(token)
    assert CODEC.decode([19556, token, 905], skip_special_tokens=True) == "Hello world"


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        CODEC.encode("a\ud83d b", add_special_tokens=True)


def test_a_gguf_tokenizer_is_built_quickly() -> None:
    metadata = GGUFFile(locate(BUNDLED).path).metadata
    start = time.process_time()
    TokenCodec(TextSource(gguf.build_tokenizer(metadata), gguf.special_tokens(metadata), {}))
    assert time.process_time() - start < 1.0


def test_an_added_token_is_plain_text_whatever_the_alphabet() -> None:
    codec = byte_codec([b"a"], special=["é", "<s t>"])
    assert [codec.token_bytes(token) for token in (0, 1, 2)] == [b"a", "é".encode(), b"<s t>"]


# --- byte-level vocabularies from GGUF metadata -------------------------------------------------------------

ALPHABET = sorted(byte_alphabet())


def byte_level_metadata(pre: str, merges: list[str], **more: Any) -> dict[str, Any]:
    tokens = [*ALPHABET, *(merge.replace(" ", "") for merge in merges), "<|begin|>", "<|end|>", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
        **more,
    }


def words(pre: str, text: str) -> list[str]:
    """The words that text is split into before merging, spelled in the byte alphabet."""
    tokenizer = gguf.build_tokenizer(byte_level_metadata(pre, []))
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["I", "'ll", "Ġsay", "Ġ123", "ĊĊ", "Ġok"]),
        ("smollm", ["I", "'ll", "Ġsay", "Ġ", "1", "2", "3", "ĊĊ", "Ġok"]),
        ("llama-bpe", ["I", "'ll", "Ġsay", "Ġ", "123", "ĊĊ", "Ġok"]),
        ("qwen2", ["I", "'ll", "Ġsay", "Ġ", "1", "2", "3", "ĊĊ", "Ġok"]),
        ("tekken", ["I", "'ll", "Ġsay", "Ġ", "1", "2", "3", "ĊĊ", "Ġok"]),
        ("gpt-4o", ["I'll", "Ġsay", "Ġ", "123", "ĊĊ", "Ġok"]),
    ],
)
def test_how_text_is_split(pre: str, expected: list[str]) -> None:
    assert words(pre, "I'll say 123\n\n ok") == expected


def test_which_names_compose_characters() -> None:
    decomposed, composed = "e\u0301", "é".encode()
    for pre, size in (("qwen2", 2), ("llama-bpe", 3)):
        codec = TokenCodec(TextSource(gguf.build_tokenizer(byte_level_metadata(pre, [])), {}, {}))
        ids = codec.encode(decomposed, add_special_tokens=False)
        assert len(ids) == size
        assert (b"".join(map(codec.token_bytes, ids)) == composed) == (pre == "qwen2")


@pytest.mark.parametrize(
    ("pre", "flags", "around"),
    [
        ("llama-bpe", {}, (True, False)),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, (False, False)),
        ("smollm", {}, (False, False)),
        (
            "smollm",
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True},
            (True, True),
        ),
    ],
)
def test_tokens_around_a_text(pre: str, flags: dict[str, Any], around: tuple[bool, bool]) -> None:
    metadata = byte_level_metadata(pre, ["h i"], **flags)
    codec = TokenCodec(TextSource(gguf.build_tokenizer(metadata), gguf.special_tokens(metadata), {}))
    plain = codec.encode("hi", add_special_tokens=False)
    assert plain == [256]
    expected = [codec.bos_id] * around[0] + plain + [codec.eos_id] * around[1]
    assert codec.encode("hi", add_special_tokens=True) == expected


def test_user_defined_tokens_are_matched_and_not_special() -> None:
    codec = TokenCodec(TextSource(gguf.build_tokenizer(byte_level_metadata("smollm", [])), {}, {}))
    (token,) = codec.encode("<tool>", add_special_tokens=False)
    assert not codec.is_special(token)
    assert codec.decode([token], skip_special_tokens=True) == "<tool>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "bloom"}, "pre-tokenizer 'bloom' is not supported .*smollm"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model 'bert' is not supported"),
        ({"tokenizer.ggml.tokens": []}, "no vocabulary"),
        ({"tokenizer.ggml.merges": None}, "no merges"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, "merges do not fit"),
        ({"tokenizer.ggml.token_type": [1]}, "one type for each token"),
    ],
)
def test_metadata_that_cannot_be_used(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        gguf.build_tokenizer({**byte_level_metadata("smollm", []), **change})


def test_chat_templates_of_a_gguf_file() -> None:
    found = gguf.chat_templates(
        {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b", "x": 1}
    )
    assert found == {"default": "a", "tool_use": "b"}


# --- SentencePiece vocabularies -----------------------------------------------------------------------------

CORPUS = [
    f"the {word} of the {other}s" for word in ("cat", "hat", "tale") for other in ("mat", "cattle", "hatter")
]


def sentencepiece_reference() -> tuple[Tokenizer, list[str]]:
    """A small BPE over "▁"-spelled text with byte fallback, as the library itself trains and runs it."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, special_tokens=names, show_progress=False)
    )
    spec = json.loads(trained.to_str())["model"]
    model = models.BPE(
        vocab=spec["vocab"],
        merges=[tuple(merge) for merge in spec["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    reference = Tokenizer(model)
    reference.normalizer = trained.normalizer
    reference.add_special_tokens([AddedToken(name, normalized=False) for name in ("<s>", "</s>")])
    tokens = sorted(spec["vocab"], key=spec["vocab"].get)
    return reference, tokens


def sentencepiece_metadata(tokens: list[str]) -> dict[str, Any]:
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [-float(place) for place in range(len(tokens))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_encodes_as_the_reference() -> None:
    reference, tokens = sentencepiece_reference()
    built = gguf.build_tokenizer(sentencepiece_metadata(tokens))
    rng = random.Random(3)
    pieces = ["the", " ", "cat", "hatter", "s", "  ", "\n", "é", "日", "🙂", "tale of", "</s>", "<0x41>"]
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=rng.randrange(9)))
        assert (
            built.encode(text, add_special_tokens=False).ids
            == reference.encode(text, add_special_tokens=False).ids
        )


def test_sentencepiece_bytes_and_spaces() -> None:
    _, tokens = sentencepiece_reference()
    metadata = sentencepiece_metadata(tokens)
    codec = TokenCodec(TextSource(gguf.build_tokenizer(metadata), gguf.special_tokens(metadata), {}))
    ids = codec.encode("the cat 🙂", add_special_tokens=True)
    assert ids[0] == codec.bos_id == 1
    assert codec.token_bytes(ids[1]).startswith(b" the"), "a generated word keeps its space"
    assert codec.decode(ids, skip_special_tokens=True) == "the cat 🙂", "a whole text has none before it"
    assert codec.decode(ids, skip_special_tokens=False) == "<s> the cat 🙂"
    assert [codec.token_bytes(token) for token in ids[-4:]] == [b"\xf0", b"\x9f", b"\x99", b"\x82"]
    assert codec.decode(ids[:-1], skip_special_tokens=True) == "the cat "


def test_sentencepiece_without_a_space_before_the_text() -> None:
    _, tokens = sentencepiece_reference()
    metadata = {**sentencepiece_metadata(tokens), "tokenizer.ggml.add_space_prefix": False}
    codec = TokenCodec(TextSource(gguf.build_tokenizer(metadata), gguf.special_tokens(metadata), {}))
    ids = codec.encode(" the", add_special_tokens=False)
    assert codec.decode(ids, skip_special_tokens=True) == " the"
    assert ids != codec.encode("the", add_special_tokens=False)


# --- folders ------------------------------------------------------------------------------------------------


def save_folder(folder: Path, config: dict[str, Any], tokenizer: Tokenizer | None = None) -> Checkpoint:
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    return Checkpoint(Kind.FOLDER, folder, "test")


def test_a_folder_encodes_as_the_file_it_came_from(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(bundled_source().tokenizer.to_str())
    tokenizer.enable_truncation(4)
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>", "lstrip": False},
        "chat_template": "{{ messages[0].content }}",
    }
    source = load_source(save_folder(tmp_path, config, tokenizer))
    codec = TokenCodec(source)
    assert codec.vocabulary.pieces == CODEC.vocabulary.pieces
    assert (codec.bos_id, codec.eos_id) == (1, 2)
    assert codec.encode(SAMPLE, add_special_tokens=True) == CODEC.encode(SAMPLE, add_special_tokens=True)
    assert source.chat_templates == {"default": "{{ messages[0].content }}"}


def test_templates_of_a_folder(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    named = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "tools"}]
    checkpoint = save_folder(tmp_path, {"chat_template": named}, tokenizer)
    (tmp_path / "chat_template.jinja").write_text("new")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    assert load_source(checkpoint).chat_templates == {"default": "new", "tool_use": "tools", "rag": "rag"}


def test_a_role_makes_a_token_special(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.add_tokens(["[END]"])
    source = load_source(save_folder(tmp_path, {"eos_token": "[END]"}, tokenizer))
    assert TokenCodec(source).is_special(1)


def test_a_folder_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    chars = {byte: char for char, byte in byte_alphabet().items()}
    vocab = {char: token for token, char in enumerate(chars[byte] for byte in range(256))}
    vocab |= {"hi": 256, "<|endoftext|>": 257}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh i\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    codec = TokenCodec(load_source(save_folder(tmp_path, config)))
    assert codec.encode("hi!", add_special_tokens=False) == [256, ord("!")]
    assert codec.decode([256, ord("!"), 257], skip_special_tokens=True) == "hi!"


@pytest.mark.parametrize("content", ["", "{}", "not json"])
def test_a_broken_tokenizer_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_source(Checkpoint(Kind.FOLDER, tmp_path, "test"))


def test_a_decoder_whose_bytes_are_not_known() -> None:
    tokenizer = Tokenizer(models.WordPiece(vocab={"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="decoder WordPiece is not supported"):
        TokenCodec(TextSource(tokenizer, {}, {}))
