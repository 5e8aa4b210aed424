"""The fixtures of the bundled model through the whole path: HTTP, Redis, tokenizer, engine, detokenizer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.helpers.asking import Body, both, chat, completion
from tests.helpers.stack import Stack

ALPHABET = "Here is the English alphabet: ABC"
FRANCE = {"role": "user", "content": "What is the capital of France?"}


@dataclass(frozen=True)
class Fixture:
    """What is asked, and what comes out: text, finish reason, prompt and completion tokens."""

    body: Body
    text: str
    finish: str
    usage: tuple[int, int]


FIXTURES = {
    "FX1": Fixture(completion(ALPHABET), "DEFGHIJKLMNOPQRSTUVWXYZ\n\n", "length", (7, 16)),
    "FX2": Fixture(completion("日本語日本語日本語", max_tokens=18), "日本語日本語日本語", "length", (18, 18)),
    # Never valid UTF-8; of the last character, which may still become one, nothing is shown.
    "FX3": Fixture(completion("🙂🙂🙂🙂🙂🙂", max_tokens=40), "\ufffd" * 19, "length", (12, 40)),
    "FX4": Fixture(completion("😀 😃 😄 😁 😆 😅 😂 🤣 😊 😇 🙂"), " 😊" * 8, "length", (23, 16)),
    "FX5": Fixture(completion("今天天气如何"), "；" * 8, "length", (13, 16)),
    "FX6": Fixture(chat([FRANCE]), "The capital of France is Paris.", "stop", (37, 8)),
    "FX7": Fixture(
        chat("Count from 1 to 10, one number per line."),
        "\n".join(f"{number}. {number}" for number in range(1, 11)),
        "stop",
        (44, 52),
    ),
    "FX8": Fixture(
        chat("Return a JSON object with keys name and age for Alice who is 30."),
        '{\n  "name": "Alice",\n  "age": 30\n}',
        "stop",
        (47, 18),
    ),
    "FX9": Fixture(
        chat([FRANCE, {"role": "assistant", "content": "The capital of"}], continue_final_message=True),
        " France is Paris.",
        "stop",
        (40, 5),
    ),
    "FX10": Fixture(chat("Repeat exactly: 🙂🙂🙂🙂"), "Repeat exactly:🙂🙂🙂", "stop", (40, 10)),
    # Token 231 ends the character that the prompt began.
    "FX11": Fixture(completion([19556, 905, 15107, 230], max_tokens=1), "🌍", "length", (4, 1)),
}


@pytest.mark.parametrize("name", FIXTURES)
def test_fixture(stack: Stack, name: str) -> None:
    fixture = FIXTURES[name]
    said = both(stack.port, fixture.body)
    assert (said.text, said.finishes, said.usage) == (fixture.text, (fixture.finish,), fixture.usage)


@pytest.mark.parametrize(
    ("prompt", "stop", "text", "matched", "tokens"),
    [
        (ALPHABET, "DEFGHIJ", "", "DEFGHIJ", 4),
        (ALPHABET, "FGH", "DE", "FGH", 2),
        (ALPHABET, "HI", "DEFG", "HI", 3),
        (ALPHABET, ["LMX", "OPQ"], "DEFGHIJKLMN", "OPQ", 9),
        (ALPHABET, "Z\n\nQ", "DEFGHIJKLMNOPQRSTUVWXYZ\n\n", None, 16),
        ("日本語日本語日本語", "本語", "日", "本語", 6),
    ],
)
def test_stop_strings(
    stack: Stack, prompt: str, stop: str | list[str], text: str, matched: str | None, tokens: int
) -> None:
    """Cut before the match. Tokens count up to the one that completed it, whatever the engine did more."""
    said = both(stack.port, completion(prompt, stop=stop))
    finish = "stop" if matched else "length"
    assert (said.text, said.finishes, said.stops) == (text, (finish,), (matched,))
    assert said.usage[1] == tokens


def test_a_stop_string_that_is_wanted_in_the_text(stack: Stack) -> None:
    said = both(stack.port, completion(ALPHABET, stop=["LMX", "OPQ"], include_stop_str_in_output=True))
    assert (said.text, said.finishes, said.stops) == ("DEFGHIJKLMNOPQ", ("stop",), ("OPQ",))


def test_a_stop_token(stack: Stack) -> None:
    """Its text is left out, and counted; ` Paris` is token 7042."""
    said = both(stack.port, chat([FRANCE], stop_token_ids=[7042]))
    assert (said.text, said.finishes, said.stops) == ("The capital of France is", ("stop",), (7042,))
    assert said.usage == (37, 6)
