"""One choice from tokens to deltas: ends, stop tokens, stop strings, prompts that end inside a character."""

from __future__ import annotations

import pytest

from common.errors import MillstreamError
from common.sampling import SamplingParams
from tests.helpers.text import byte_codec
from workers.text.stream import ChoiceDecoder, Delta, TextStreams

PIECES = [b"Hello", b" wor", b"ld", b"!", b"\xf0\x9f", b"\x99\x82", b"\n", b"END", b"\x82", b"A"]
HELLO, WOR, LD, BANG, LEAD, REST, NEWLINE, END_WORD, LAST, LETTER = range(10)
CODEC = byte_codec(PIECES, special=["<|end|>", "<|tool|>"])
EOS, TOOL = CODEC.special["<|end|>"].id, CODEC.special["<|tool|>"].id
STREAMS = TextStreams(CODEC)


def decoder(prompt: list[int] | None = None, **params: object) -> ChoiceDecoder:
    return ChoiceDecoder(STREAMS.open(SamplingParams(**params)), prompt or [])  # type: ignore[arg-type]


def run(
    ids: list[int], finish: str | None = None, prompt: list[int] | None = None, **params: object
) -> list[Delta]:
    choice = decoder(prompt, **params)
    last = len(ids) - 1
    return [choice.push(at, token, finish if at == last else None) for at, token in enumerate(ids)]


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_deltas_say_where_they_are() -> None:
    assert run([HELLO, LEAD, REST, LD], "length") == [
        Delta("Hello", 0, 1),
        Delta("", 5, 2),
        Delta("🙂", 5, 3),
        Delta("ld", 6, 4, "length"),
    ]


@pytest.mark.parametrize(
    ("params", "shown"),
    [
        ({}, ""),
        ({"skip_special_tokens": False}, ""),
        ({"include_stop_str_in_output": True}, ""),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "<|end|>"),
    ],
)
def test_an_end_id_is_counted_and_rarely_shown(params: dict[str, object], shown: str) -> None:
    assert run([HELLO, EOS], "stop", **params)[-1] == Delta(shown, 5, 2, "stop")


def test_a_stop_token_id_is_reported_and_hidden() -> None:
    assert run([HELLO, BANG], "stop", stop_token_ids=(BANG,))[-1] == Delta("", 5, 2, "stop", BANG)
    included = run([HELLO, BANG], "stop", stop_token_ids=(BANG,), include_stop_str_in_output=True)
    assert included[-1] == Delta("!", 5, 2, "stop", BANG)


def test_special_tokens_inside_are_hidden_or_shown() -> None:
    assert text(run([HELLO, TOOL, LD])) == "Hellold"
    assert text(run([HELLO, TOOL, LD], skip_special_tokens=False)) == "Hello<|tool|>ld"


def test_a_character_around_a_hidden_token_stays_whole() -> None:
    assert text(run([LEAD, TOOL, REST])) == "🙂"


def test_an_incomplete_character_at_the_end_is_dropped() -> None:
    assert run([HELLO, LEAD], "length")[-1] == Delta("", 5, 2, "length")


def test_known_invalid_bytes_come_out_at_once() -> None:
    assert [delta.text for delta in run([LEAD, LEAD, HELLO, REST])] == [
        "",
        "\ufffd",
        "\ufffdHello",
        "\ufffd\ufffd",
    ]


def test_a_stop_string_over_tokens_cuts_and_ends() -> None:
    deltas = run([HELLO, WOR, LD, BANG], "length", stop=("world",))
    assert text(deltas) == "Hello "
    assert deltas[2] == Delta("", 6, 3, "stop", "world")
    assert deltas[3] == Delta("", 6, 3), "tokens after the end are ignored and not counted"


def test_an_included_stop_string_is_kept_to_its_end() -> None:
    deltas = run([HELLO, WOR, LD, BANG], stop=("wor",), include_stop_str_in_output=True)
    assert text(deltas) == "Hello wor"
    assert deltas[1].n == 2


def test_what_was_held_comes_out_at_the_end() -> None:
    deltas = run([HELLO, WOR], "length", stop=(" world",))
    assert [delta.text for delta in deltas] == ["Hello", " wor"]
    assert deltas[-1].finish_reason == "length"
    assert run([HELLO, WOR, EOS], "stop", stop=(" world",))[-1] == Delta(" wor", 5, 3, "stop")


def test_a_stop_string_completed_by_the_last_token_wins() -> None:
    assert run([HELLO, BANG], "length", stop=("o!",)) == [Delta("Hell", 0, 1), Delta("", 4, 2, "stop", "o!")]


def test_stop_strings_wait_for_min_tokens() -> None:
    assert text(run([END_WORD, HELLO, END_WORD, HELLO], stop=("END",), min_tokens=1)) == "ENDHello"
    assert run([END_WORD], "length", stop=("END",), min_tokens=1) == [Delta("END", 0, 1, "length")]
    spanning = run([HELLO, WOR, LD], stop=("world",), min_tokens=2)
    assert (text(spanning), spanning[-1].stop_reason) == ("Hello ", "world"), "its last token counts"


@pytest.mark.parametrize(("include", "shown"), [(False, "Hello"), (True, "Hello<|tool|>")])
def test_a_stop_string_may_spell_a_hidden_special_token(include: bool, shown: str) -> None:
    deltas = run([HELLO, TOOL, LD], stop=("<|tool|>",), include_stop_str_in_output=include)
    assert text(deltas) == shown
    assert deltas[1][2:] == (2, "stop", "<|tool|>")
    visible = run([HELLO, TOOL, LD], stop=("l|>",), skip_special_tokens=False)
    assert (text(visible), visible[1].stop_reason) == ("Hello<|too", "l|>")


def test_a_prompt_that_ends_inside_a_character_is_not_shown_again() -> None:
    assert text(run([REST, HELLO], prompt=[HELLO, LEAD])) == "🙂Hello"
    assert text(run([HELLO], prompt=[HELLO, LEAD])) == "Hello", (
        "an unfinished character of the prompt is nobody's"
    )
    assert text(run([LEAD, REST], prompt=[LEAD])) == "🙂"
    assert text(run([TOOL, REST], prompt=[LEAD])) == "🙂"
    assert text(run([REST], prompt=[LEAD, REST])) == "\ufffd\ufffd", "a whole character leaves nothing open"
    assert text(run([REST], prompt=[LEAD, EOS])) == "\ufffd\ufffd"


def test_half_a_character_of_the_prompt_and_an_invalid_rest() -> None:
    codec = byte_codec([b"\xf0", b"\x9f", b"\x99", b"A"])
    choice = ChoiceDecoder(TextStreams(codec).open(SamplingParams()), [0, 1])
    assert [choice.push(0, 2).text, choice.push(1, 3).text] == ["", "\ufffdA"], "what was generated is shown"


def test_a_stop_string_never_matches_the_prompt() -> None:
    assert text(run([LD], prompt=[WOR], stop=("world", "ld!"))) == ""  # "ld" may become "ld!"
    assert run([LD], "length", prompt=[WOR], stop=("world",)) == [Delta("ld", 0, 1, "length")]


def test_repeats_change_nothing_and_gaps_are_refused() -> None:
    choice = decoder()
    choice.push(0, HELLO)
    assert choice.push(0, HELLO) == Delta("", 5, 1)
    with pytest.raises(MillstreamError, match=r"token 2 .* where 1 was due"):
        choice.push(2, HELLO)
    assert choice.push(1, LD) == Delta("ld", 5, 2)


def test_an_end_without_a_token() -> None:
    choice = decoder(stop=(" world",))
    choice.push(0, WOR)
    assert choice.end("length") == Delta(" wor", 0, 1, "length")
    assert choice.end("length") == Delta("", 4, 1)


def test_ids_without_a_token_add_nothing() -> None:
    assert text(run([HELLO, CODEC.vocab_size + 5, LD])) == "Hellold"
