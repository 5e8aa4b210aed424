"""Token ids and rendered chats against transformers, which the models were trained and released with."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequestError
from tests.helpers.templates import ALL
from tests.helpers.text import BUNDLED, bundled_codec, bundled_source
from workers.checkpoint import locate
from workers.text.chat import ChatTemplate

CODEC = bundled_codec()
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Zażółć gęślą jaźń. Füße, naïve café, smörgåsbord, İstanbul, ǅ",
    "今天天气如何？日本語のテキストです。한국어 문장입니다.",
    "السلام عليكم وهذا نص طويل. שלום עולם. नमस्ते दुनिया। สวัสดีชาวโลก",
    "Привет, мир! Γειά σου Κόσμε. Բարեւ աշխարհ.",
    "🙂🙂 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 e\u0301 \u200b\u200d\ufeff \U0001f600\U0010fffd",
    'def f(x: int) -> str:\n\treturn f"{x!r}"  # comment\n\n\nclass A:\n    """Doc."""\n    y = 0x1F\n',
    '{"a": [1, 2.5, null], "b\\n": "\\u00e9"}\r\n<div class="x">&nbsp;</div>\r\n',
    "   leading, trailing   and\t\ttabs \n \n  \n\n   ",
    "I'm you're he'll we've I'd it's can't 'Tis 'LL 'S",
    "1234567890 3.14159 1,000,000 12:34 2024-01-31 v1.2.3",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>a<|im_end|><|im_end|>b <repo_name>",
    "a" * 300 + " " * 300 + "\n" * 300 + "!?" * 100,
    "",
    " ",
    "\x00\x01\x7f\x80\xad",
]


@functools.cache
def load_reference() -> Any:
    from transformers import AutoTokenizer

    path = locate(BUNDLED).path
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.fixture
def reference() -> Any:
    return load_reference()


@pytest.mark.parametrize("text", TEXTS)
def test_encoding(reference: Any, text: str) -> None:
    expected = reference.encode(text, add_special_tokens=False)
    assert CODEC.encode(text, add_special_tokens=False) == expected
    assert CODEC.decode(expected, skip_special_tokens=False) == text


def test_special_ids(reference: Any) -> None:
    assert (CODEC.bos_id, CODEC.eos_id) == (reference.bos_token_id, reference.eos_token_id)
    special = [token for token, added in reference.added_tokens_decoder.items() if added.special]
    assert [token for token in range(CODEC.vocab_size) if CODEC.is_special(token)] == sorted(special)
    assert len(reference) == CODEC.vocab_size


# Numbers other than ASCII digits are left out: the GGUF converter of transformers does not split them,
# while this vocabulary was trained with every one on its own.
CHARS = st.characters(exclude_categories=["Cs", "Nd", "Nl", "No"])
#: Bytes of rare planes that the vocabulary has no token for; the encoder drops them.
LOST = frozenset(range(256)) - {piece[0] for piece in CODEC.vocabulary.pieces if piece and len(piece) == 1}


@given(st.text(st.one_of(st.sampled_from(" \n\t'ab.,!0123456789"), CHARS), max_size=60))
@settings(max_examples=300)
def test_encoding_of_any_text(text: str) -> None:
    ids = CODEC.encode(text, add_special_tokens=False)
    assert ids == load_reference().encode(text, add_special_tokens=False)
    if not LOST.intersection(text.encode()):
        assert CODEC.decode(ids, skip_special_tokens=False) == text


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, "é"]}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": " What is <b>this</b>? "}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\n"},
        {"role": "user", "content": "日本 🙂"},
    ],
    "tools": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
    ],
    "open": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The capital of "}],
}


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
@pytest.mark.parametrize("name", ["bundled", *ALL])
def test_rendering(reference: Any, name: str, messages: list[dict[str, Any]]) -> None:
    text = ALL.get(name) or bundled_source().chat_templates["default"]
    chat = ChatTemplate({"default": text}, reference.special_tokens_map)
    shown = messages
    if name == "parts":
        shown = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
    for prompt, continued in ((True, False), (False, False), (False, True)):
        if continued and messages[-1]["role"] != "assistant":
            continue
        ours: dict[str, Any] = {"add_generation_prompt": prompt, "continue_final_message": continued}
        try:
            expected = reference.apply_chat_template(
                shown, chat_template=text, tokenize=False, tools=[CALL] if name == "tools" else None, **ours
            )
        except Exception as error:
            with pytest.raises(InvalidRequestError, match=str(error)):
                chat.render(messages, tools=[CALL] if name == "tools" else None, **ours)
        else:
            assert chat.render(messages, tools=[CALL] if name == "tools" else None, **ours) == expected
