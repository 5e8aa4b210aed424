"""Rows of logprobs: names of tokens, places in the text, prompts whose stretches come again; and echoes."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from tokenizers import Tokenizer, decoders, models

from common.sampling import SamplingParams
from tests.helpers.text import byte_codec
from workers.text.codec import TokenCodec
from workers.text.echo import write_echo
from workers.text.place import Place
from workers.text.source import TextSource
from workers.text.stream import ChoiceDecoder, TextStreams

PIECES = [b"Hello", b" wor", b"ld", b"!", b"\xf0\x9f", b"\x99\x82"]
HELLO, WOR, LD, BANG, LEAD, REST = range(6)
CODEC = byte_codec(PIECES, special=["<|end|>"])
END = CODEC.special["<|end|>"].id
STREAMS = TextStreams(CODEC)


def test_a_row_names_its_tokens() -> None:
    row = STREAMS.rows.row(WOR, "-0.5,1:-0.5,4:-2.25,6:-3", Place(5, hidden=False))
    assert orjson.dumps(row).decode() == (
        '{"id":1,"token":" wor","logprob":-0.5,"at":5,'
        '"top":[[" wor",-0.5,1],[[240,159],-2.25,4],["<|end|>",-3.0,6]]}'
    )
    assert STREAMS.rows.row(END, "-1", Place(0, hidden=True)) == {
        "id": END, "token": "<|end|>", "logprob": -1.0, "at": 0, "top": [], "hidden": True,
    }  # fmt: skip


def test_an_id_without_a_token_has_no_name() -> None:
    assert STREAMS.rows.row(99, "-1,98:-1", Place(0, hidden=True))["token"] == ""


@pytest.mark.parametrize("least", ["-inf", "nan", "-9999", "-1e30"])
def test_json_can_hold_every_logprob(least: str) -> None:
    row = STREAMS.rows.row(HELLO, f"{least},1:{least}", Place(0, hidden=False))
    assert (row["logprob"], row["top"][0][1]) == (-9999.0, -9999.0)


def places(
    ids: list[int], finish: str | None = None, prompt: tuple[int, ...] = (), **params: Any
) -> list[Any]:
    choice = ChoiceDecoder(STREAMS.open(SamplingParams(**params)), prompt)
    found = []
    for index, token in enumerate(ids):
        last = finish if index == len(ids) - 1 else None
        found.append(choice.place(token, last))
        choice.push(index, token, last)
    return [(place.at, "hidden") if place.hidden else place.at for place in found]


def test_places_count_code_points() -> None:
    assert places([HELLO, LEAD, REST, BANG]) == [0, 5, 5, 6], "the parts of a character share its place"
    assert places([LEAD, LEAD, HELLO]) == [0, 1, 2], "what comes behind a broken character has its own"
    assert places([REST, HELLO], prompt=(LEAD,)) == [0, 1], "completes a character of the prompt"
    assert places([HELLO, REST], prompt=(LEAD,)) == [0, 5], "does not, and the prompt's part is forgotten"
    assert places([HELLO, WOR, LD, BANG], stop=(" worn",)) == [0, 5, 9, 11], "held text counts"


def test_what_adds_nothing_is_hidden() -> None:
    hidden = (5, "hidden")
    assert places([HELLO, END], "stop") == [0, hidden]
    assert places([HELLO, BANG], "stop", stop_token_ids=(BANG,)) == [0, hidden]
    assert places([HELLO, BANG], "stop", stop_token_ids=(BANG,), include_stop_str_in_output=True) == [0, 5]
    assert places([HELLO, END, BANG], "length") == [0, hidden, 5]
    assert places([HELLO, END, BANG], "length", skip_special_tokens=False) == [0, 5, 12]
    assert places([HELLO, 99, BANG], "length") == [0, hidden, 5]


def test_a_special_token_that_is_a_stop_string_is_not_hidden_but_cut() -> None:
    assert places([HELLO, END], stop=("<|end|>",)) == [0, 5]
    assert places([HELLO, END], stop=("<|end|>",), min_tokens=3) == [0, (5, "hidden")]


PROMPT = [HELLO, LEAD, REST, END, BANG]


def stretch(text: str) -> Any:
    return orjson.loads(text) if text else None


def test_rows_of_a_prompt() -> None:
    rows = STREAMS.rows.prompt(PROMPT)
    first = stretch(rows.take("1;-1,4:-1;-2"))
    assert (first["from"], first["end"]) == (0, 6)
    assert [(row["token"], row["logprob"], row["at"]) for row in first["rows"]] == [
        ("Hello", None, 0),
        ([240, 159], -1.0, 5),
        ([153, 130], -2.0, 5),
    ]
    rest = stretch(rows.take("3;-3;-4"))
    assert (rest["from"], rest["end"]) == (3, 14)
    assert [(row["token"], row["at"]) for row in rest["rows"]] == [("<|end|>", 6), ("!", 13)]


def test_positions_come_once() -> None:
    rows = STREAMS.rows.prompt(PROMPT)
    rows.take("1;-1;-2")
    assert rows.take("1;-1") == ""
    again = stretch(rows.take("1;-1;-2;-3"))
    assert (again["from"], [row["logprob"] for row in again["rows"]]) == (3, [-3.0])
    assert stretch(rows.take("4;-4;-5;-6"))["from"] == 4
    assert (rows.take("1;-1;-2;-3;-4"), rows.take("")) == ("", "")


@pytest.mark.parametrize("done", range(6))
def test_a_new_owner_goes_on_behind_what_is_published(done: int) -> None:
    whole = stretch(STREAMS.rows.prompt(PROMPT).take("1;-1;-2;-3;-4"))
    rest = stretch(STREAMS.rows.prompt(PROMPT, done).take("1;-1;-2;-3;-4"))
    assert (rest["rows"] if rest else []) == whole["rows"][done:]
    assert STREAMS.rows.prompt(PROMPT, 2**63 - 1).take("1;-1") == ""


def test_a_prompt_of_one_token_has_a_row_too() -> None:
    assert stretch(STREAMS.rows.prompt([HELLO]).take(""))["rows"][0]["logprob"] is None


def test_a_position_that_never_comes_leaves_the_others_in_their_places() -> None:
    got = stretch(STREAMS.rows.prompt(PROMPT).take("3;-3;-4"))
    assert [row["logprob"] for row in got["rows"]] == [None, None, None, -3.0, -4.0]


def test_an_echo_is_the_prompt_as_it_was_given() -> None:
    assert write_echo(CODEC, ["Hello!"], [[HELLO, BANG]]) == '[["Hello!",0]]'
    assert write_echo(CODEC, ["Hello"], [[END, HELLO]]) == '[["Hello",7]]', "the tokenizer added a token"
    assert write_echo(CODEC, ["HELLO"], [[HELLO]]) == '[["HELLO",0]]', "the tokenizer changed the text"
    ids = [HELLO, LEAD, REST, END, LEAD]
    assert write_echo(CODEC, [ids, [99]], [ids, [99]]) == '[["Hello🙂<|end|>",0],["",0]]'


def test_an_echo_without_the_space_that_the_tokenizer_puts_first() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"▁a": 0, "b": 1}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    codec = TokenCodec(TextSource(tokenizer, {}, {}))
    assert write_echo(codec, ["ab", [0, 1]], [[0, 1], [0, 1]]) == '[["ab",1],["ab",1]]'
