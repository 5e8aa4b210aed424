"""The fixtures of the bundled model at text level: token ids in, exact text out."""

from __future__ import annotations

import time

import pytest

from common.sampling import SamplingParams
from tests.helpers.text import bundled_codec, bundled_source
from workers.text.chat import ChatTemplate
from workers.text.stream import ChoiceDecoder, Delta, TextStreams

CODEC = bundled_codec()
STREAMS = TextStreams(CODEC)
TEMPLATE = ChatTemplate.of(bundled_source())
ALPHABET_PARTS = ["DEF", "GH", "I", "J", "K", "LM", "N", "OP", "QR", "ST", "UV", "W", "XY", "Z", "\n", "\n"]
ALPHABET = "DEFGHIJKLMNOPQRSTUVWXYZ\n\n"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def encode(text: str) -> list[int]:
    return CODEC.encode(text, add_special_tokens=True)


def stream(
    ids: list[int], prompt: list[int] | None = None, finish: str = "length", **params: object
) -> list[Delta]:
    choice = ChoiceDecoder(STREAMS.open(SamplingParams(**params)), prompt or [])
    return [choice.push(at, token, finish if at == len(ids) - 1 else None) for at, token in enumerate(ids)]


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def alphabet_ids() -> list[int]:
    return [token for part in ALPHABET_PARTS for token in encode(part)]


def test_fx1_each_token_is_released_as_it_comes() -> None:
    assert [delta.text for delta in stream(alphabet_ids())] == ALPHABET_PARTS


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("DEFGHIJ",), ""),
        (("FGH",), "DE"),
        (("HI",), "DEFG"),
        (("LMX", "OPQ"), "DEFGHIJKLMN"),
    ],
)
def test_fx1_stop_strings(stop: tuple[str, ...], expected: str) -> None:
    deltas = stream(alphabet_ids(), stop=stop)
    assert text(deltas) == expected
    assert [(d.finish_reason, d.stop_reason) for d in deltas if d.finish_reason] == [("stop", stop[-1])]


def test_fx1_a_stop_string_that_does_not_come() -> None:
    deltas = stream(alphabet_ids(), stop=("Z\n\nQ",))
    assert (text(deltas), deltas[-1].finish_reason) == (ALPHABET, "length")


def test_fx2_characters_of_several_tokens() -> None:
    ids = encode("日本語日本語日本語")
    assert ids[:6] == [23274, 115, 40993, 179, 120, 248]
    prompt = ids
    assert [d.text for d in stream(ids[:6], prompt)] == ["", "日", "本", "", "", "語"]
    assert [text(stream(ids[:n], prompt)) for n in (1, 2, 4, 5)] == ["", "日", "日本", "日本"]
    assert text(stream(ids[:6], prompt, stop=("本語",))) == "日"


def test_fx3_text_that_never_becomes_valid_flows() -> None:
    ids = [10813, 230] * 300
    assert encode("🙂🙂🙂🙂🙂🙂")[-1] != 230, "the loop is not the prompt"
    deltas = stream(ids)
    for pairs in (1, 2, 150, 300):  # a character that was only begun waits for the next token, no longer
        assert text(deltas[: 2 * pairs]) == "\ufffd" * (pairs - 1)
    assert text(deltas) == CODEC.decode(ids, skip_special_tokens=True)


def test_fx3_costs_the_same_for_every_token() -> None:
    def spent(pairs: int) -> float:
        start = time.thread_time()
        stream([10813, 230] * pairs)
        return time.thread_time() - start

    # Linear is 16 times as much; the library's own decoder, which is quadratic, takes 256 times.
    few, many = (min(spent(pairs) for _ in range(3)) for pairs in (1_000, 16_000))
    assert many < 5 * 16 * few


@pytest.mark.parametrize(("ids", "expected"), [([40303, 228] * 3, " 😊 😊 😊"), ([8083, 245] * 3, "；；；")])
def test_fx4_fx5_two_tokens_a_character(ids: list[int], expected: str) -> None:
    assert [d.text.strip() for d in stream(ids)][::2] == [""] * 3
    assert text(stream(ids)) == expected


def test_fx6_the_chat_prompt_and_its_answer() -> None:
    prompt = CODEC.encode(TEMPLATE.render(FRANCE), add_special_tokens=False)
    assert len(prompt) == 37
    answer = [*encode("The capital of France is Paris."), 2]
    deltas = stream(answer, prompt, finish="stop")
    assert (text(deltas), deltas[-1][2:]) == ("The capital of France is Paris.", (8, "stop", None))


@pytest.mark.parametrize(
    ("question", "answer", "tokens"),
    [
        ("Count from 1 to 10, one number per line.", "\n".join(f"{n}. {n}" for n in range(1, 11)), 52),
        (
            "Return a JSON object with keys name and age for Alice who is 30.",
            '{\n  "name": "Alice",\n  "age": 30\n}',
            18,
        ),
    ],
)
def test_fx7_fx8_token_counts(question: str, answer: str, tokens: int) -> None:
    assert question in TEMPLATE.render([{"role": "user", "content": question}])
    ids = [*encode(answer), 2]
    assert len(ids) == tokens
    assert text(stream(ids, finish="stop")) == answer


def test_fx9_the_last_message_is_left_open() -> None:
    messages = [*FRANCE, {"role": "assistant", "content": "The capital of"}]
    rendered = TEMPLATE.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered == TEMPLATE.render(FRANCE) + "The capital of"


def test_fx10_repeated_emoji_in_a_chat() -> None:
    ids = encode("Repeat exactly:🙂🙂🙂")
    assert text(stream(ids)) == "Repeat exactly:🙂🙂🙂"
    assert "\ufffd" not in text(stream(ids[:-1]))


def test_fx11_a_prompt_that_ends_inside_a_character() -> None:
    prompt = [19556, 905, 15107, 230]
    assert CODEC.decode(prompt, skip_special_tokens=True) == "Hello world "
    for token in (131, 231):
        deltas = stream([token], prompt)
        assert len(deltas[0].text) == 1
        assert "Hello" not in deltas[0].text
        echoed = CODEC.decode(prompt, skip_special_tokens=True) + deltas[0].text
        assert echoed == CODEC.decode([*prompt, token], skip_special_tokens=True), "echo and answer join"


def test_a_stop_string_inside_one_token() -> None:
    ids = encode(" international")
    assert len(ids) == 1
    assert text(stream(ids, stop=("nation",))) == " inter"
