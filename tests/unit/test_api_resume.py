"""Streams with ids, and going on after one of them: every event exactly once, wherever the reader was."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request as HttpRequest

from api.events import ChatStream, CompletionStream, GapError
from api.resume import START, Numbered, Position
from api.routes.streams import _seen
from common.errors import DeadlineError, InvalidRequestError
from common.messages import Kind, OutEntry, Request, Usage
from common.sampling import SamplingParams

UID = "0-" + "a" * 32
DONE = b"data: [DONE]"


def stream(kind: Kind = Kind.CHAT, *, usage: bool = True) -> Any:
    reply = {
        "model": "m", "created": 7, "fingerprint": "fp", "stream": True, "usage": usage,
        "running_usage": False,
    }  # fmt: skip
    request = Request(UID, kind, "m", SamplingParams(), {}, reply, choices=2)
    return (ChatStream if kind is Kind.CHAT else CompletionStream)(request)


def reply_of(*texts: str, error: bool = False) -> list[OutEntry]:
    """Two choices that say the texts in turn; the last of each comes with its finish."""
    entries = [OutEntry("5-0", accepted=3)]
    at = {0: 0, 1: 0}
    for number, text in enumerate(texts):
        choice = number % 2
        finish = "stop" if number >= len(texts) - 2 else ""
        entries.append(OutEntry(f"{5 + number // 3}-{1 + number}", choice, 1, at[choice], text, finish))
        at[choice] += len(text)
    if error:
        entries.append(OutEntry("99-0", error="deadline", message="Late.", end="error"))
    else:
        entries[-1].end, entries[-1].usage = "done", Usage(3, len(texts), 0)
    return entries


def events(made: bytes) -> list[bytes]:
    assert not made or made.endswith(b"\n\n")
    return made.split(b"\n\n")[:-1]


def read(entries: list[OutEntry], after: str = "0-0", kind: Kind = Kind.CHAT) -> list[bytes]:
    """The events a reader gets that saw ``after`` last."""
    numbered = Numbered(stream(kind), Position.parse(after))
    got = [event for entry in entries for event in events(numbered.push(entry))]
    assert numbered.done
    return got


def id_of(event: bytes) -> str:
    found = re.match(rb"id: (\S+)\n", event)
    assert found, event
    return found[1].decode()


@pytest.mark.parametrize("kind", [Kind.CHAT, Kind.COMPLETION])
@pytest.mark.parametrize("error", [False, True])
def test_ids_name_entries_and_what_comes_before_their_last_event(kind: Kind, error: bool) -> None:
    entries = reply_of("a", "b", "c", "d", error=error)
    numbered, plain = Numbered(stream(kind)), stream(kind)
    for entry in entries:
        made, without = events(numbered.push(entry)), events(plain.push(entry))
        assert [event.partition(b"\n")[2] for event in made] == without
        ids = [id_of(event) for event in made]
        assert ids[-1:] == [entry.id] * bool(made)
        assert ids[:-1] == [f"{entry.id}.{k}" for k in range(1, len(made))]


@given(
    st.lists(st.text(max_size=3), min_size=2, max_size=8),
    st.booleans(),
    st.sampled_from([Kind.CHAT, Kind.COMPLETION]),
)
def test_going_on_after_any_event_gives_the_rest(texts: list[str], error: bool, kind: Kind) -> None:
    entries = reply_of(*texts, error=error)
    everything = read(entries, kind=kind)
    assert everything[-1].endswith(DONE)
    for seen in range(1, len(everything)):
        assert read(entries, id_of(everything[seen - 1]), kind) == everything[seen:]


def test_after_the_end_there_is_only_done() -> None:
    entries = reply_of("a", "b")
    last = entries[-1].id
    for after in (last, "98-0", "18446744073709551615-7"):
        assert read(entries, after) == [f"id: {last}\n".encode() + DONE]
    failed = reply_of("a", "b", error=True)
    assert read(failed, "99-0") == [b"id: 99-0\n" + DONE]
    assert b'"error"' in read(failed, failed[-2].id)[0]


def test_whoever_saw_what_is_gone_gets_an_error_not_a_repeat() -> None:
    """Redis lost its last second, and the text came again under other ids."""
    entries = reply_of("a", "b", "c", "d")
    seen = read(entries)[2]
    again = [OutEntry(f"7{entry.id}", *_rest(entry)) for entry in entries[2:]]
    numbered = Numbered(stream(), Position.parse(id_of(seen)))
    assert numbered.push(entries[0]) == b""
    assert numbered.push(entries[1]) == b""
    with pytest.raises(GapError):
        numbered.push(again[0])


def _rest(entry: OutEntry) -> tuple[Any, ...]:
    return entry.choice, entry.n, entry.at, entry.text


def test_a_failure_has_no_id_to_go_on_after() -> None:
    numbered = Numbered(stream())
    numbered.push(reply_of("a", "b")[1])
    assert b"id:" not in numbered.failure(DeadlineError())
    assert numbered.done


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "5",
            "5-",
            "-5",
            "5-1-",
            "5-1.",
            "5-1.0",
            "a-1",
            "5-1 ",
            "+5-1",
            "5.1",
            "\u0665-1",
            "5-1.12345",
        ),
        *("18446744073709551616-0", "0-18446744073709551616", "1" * 21 + "-0", "5-1\n"),
    ],
)
def test_malformed_ids(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        Position.parse(text)


def test_ids_that_are_fine() -> None:
    assert Position.parse("1700000000000-12") == Position((1_700_000_000_000, 12))
    assert Position.parse("5-1.2") == Position((5, 1), 2)


def _asked(header: str | None, query: str) -> Position:
    headers = [] if header is None else [(b"last-event-id", header.encode())]
    return _seen(HttpRequest({"type": "http", "headers": headers, "query_string": query.encode()}))


def test_the_header_wins_and_both_are_read() -> None:
    assert _asked(None, "") == START
    assert _asked(None, "after=3-1") == Position.parse("3-1")
    assert _asked("4-2.1", "after=3-1") == Position.parse("4-2.1")
    for header, query in ((None, "after=x"), ("x", "after=3-1"), ("4-2", "after=x")):
        with pytest.raises(InvalidRequestError):
            _asked(header, query)
