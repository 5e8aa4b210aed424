"""Rows of logprobs and echoes through Redis: in order, once, and whole after a takeover at any record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from api.answer import Answer
from common.bus.handoffs import EmitRow, Finished, Step, Text
from common.messages import OutEntry, Request, TokRecord, format_record, join_prompts, parse_records
from common.sampling import SamplingParams
from tests.helpers.bus import Desk, Job
from tests.helpers.redis_state import contents
from tests.helpers.text import byte_codec
from workers.detokenizer.choices import Choices
from workers.text.echo import write_echo
from workers.text.stream import TextStreams

CODEC = byte_codec([b"Hello", b" wor", b"ld", b"!", b"\xf0\x9f", b"\x99\x82"])
HELLO, WOR, LD, BANG, LEAD, REST = range(6)
STREAMS = TextStreams(CODEC)
PROMPT = (HELLO, LEAD, REST, BANG)


@pytest.fixture(autouse=True)
def _partition(desk: Desk) -> None:
    desk.open_tok()
    desk.take_partition()


def running(desk: Desk, n: int = 1, **params: Any) -> tuple[Request, list[Job]]:
    request = replace(desk.request(n=n), params=SamplingParams(**params))
    desk.admit(request)
    [entry] = desk.read_in()
    desk.tok_done(request, entry, (PROMPT,))
    jobs = [Job(entry) for entry in desk.read_sched()]
    desk.open("scheduler-1")
    for job in jobs:
        desk.start(job.entry)
    return request, jobs


def emit(desk: Desk, job: Job, token: int | None = None, end: str = "", **rows: str) -> None:
    """One step with one record."""
    uid, choice = job.entry.uid, job.entry.choice
    record = format_record(TokRecord(uid, choice, job.tokens, token, end, **rows))
    piece = "" if token is None else f"{token},"
    ends = (desk.end(job),) if end else ()
    desk.emit(Step((EmitRow(uid, choice, record, piece, len(job.log)),), ends))
    job.log += piece
    job.tokens += token is not None


def publish(desk: Desk, choices: Choices, steps: int = 1) -> None:
    """What a detokenizer makes of the next steps, in one commit."""
    for entry_id, fields in desk.bus.do("XREAD", "COUNT", steps, "STREAMS", desk.tok, desk.stored())[0][1]:
        records = parse_records(fields[3].decode())
        choices.prepare(records)
        made = [each for record in records if (each := choices.push(record)) is not None]
        texts = [each for each in made if isinstance(each, Text)]
        ends = [each for each in made if isinstance(each, Finished)]
        assert desk.pub(texts, ends, offset=entry_id.decode()).code == "OK"


def owner(desk: Desk) -> Choices:
    return Choices(desk.bus, desk.keys, STREAMS)


def whole(request: Request, entries: list[OutEntry], **reply: Any) -> Any:
    shape = {"model": "m", "created": 7, "fingerprint": "f", "usage": False, "running_usage": False}
    answer = Answer(replace(request, reply=shape | reply, choices=request.n))
    for entry in entries:
        answer.push(entry)
    return orjson.loads(answer.body())["choices"][0]


@pytest.mark.parametrize("takeover", range(7))
def test_a_takeover_where_text_and_rows_are_held(desk: Desk, takeover: int) -> None:
    """The new owner has tokens but no logprobs of them; what it would need of those is published."""
    request, [job] = running(desk, logprobs=1, stop=(" worn",))
    tokens = [HELLO, LEAD, REST, WOR, LEAD, LD]
    for index, token in enumerate(tokens):
        emit(desk, job, token, "length" if index == 5 else "", logprobs=f"-{index}.5,{token}:-{index}.5")
    choices = owner(desk)
    for index in range(6):
        if index == takeover:
            choices = owner(desk)
        publish(desk, choices)
    got = whole(request, desk.out(request.uid), logprobs=1)
    assert got["text"] == "Hello🙂 wor\ufffdld"
    assert got["logprobs"]["token_logprobs"] == [-0.5, -1.5, -2.5, -3.5, -4.5, -5.5]
    assert got["logprobs"]["text_offset"] == [0, 5, 5, 6, 10, 11]
    desk.assert_empty()


def test_a_row_is_published_with_its_token_even_without_its_text(desk: Desk) -> None:
    request, [job] = running(desk, logprobs=0)
    emit(desk, job, LEAD, logprobs="-1")
    publish(desk, owner(desk))
    held = desk.out(request.uid)[-1]
    assert (held.n, held.text) == (1, "")
    assert held.logprobs == '{"id":4,"token":[240,159],"logprob":-1.0,"at":0,"top":[]}'


@pytest.mark.parametrize("params", [{}, {"logprobs": None, "prompt_logprobs": None}])
def test_rows_that_nobody_asked_for_are_left_out(desk: Desk, params: dict[str, Any]) -> None:
    request, [job] = running(desk, **params)
    emit(desk, job, prompt="1;-1")
    emit(desk, job, HELLO, logprobs="-1")
    emit(desk, job, LEAD, logprobs="-1")
    publish(desk, owner(desk), 3)
    [_, only] = desk.out(request.uid)
    assert (only.text, only.logprobs, only.prompt_logprobs) == ("Hello", "", "")


@pytest.mark.parametrize("takeover", range(5))
def test_a_prompt_comes_again_cut_otherwise(desk: Desk, takeover: int) -> None:
    request, [job] = running(desk, logprobs=0, prompt_logprobs=0)
    emit(desk, job, prompt="1;-1")
    emit(desk, job, prompt="1;-1;-2")  # from here on another scheduler
    emit(desk, job, prompt="3;-3")
    emit(desk, job, HELLO, "length", logprobs="-9")
    choices = owner(desk)
    for index in range(4):
        if index == takeover:
            choices = owner(desk)
        publish(desk, choices)
    out = desk.out(request.uid)
    stretches = [orjson.loads(entry.prompt_logprobs) for entry in out if entry.prompt_logprobs]
    assert [each["from"] for each in stretches] == [0, 2, 3]
    assert [row["logprob"] for each in stretches for row in each["rows"]] == [None, -1.0, -2.0, -3.0]
    assert [row["at"] for each in stretches for row in each["rows"]] == [0, 5, 5, 6]


def test_a_prompt_that_comes_again_after_its_first_token_is_dropped(desk: Desk) -> None:
    request, [job] = running(desk, prompt_logprobs=0)
    emit(desk, job, prompt="1;-1;-2;-3")
    emit(desk, job, HELLO)
    publish(desk, owner(desk), 2)
    before = desk.out(request.uid)
    emit(desk, job, prompt="1;-1;-2;-3")
    publish(desk, owner(desk))
    assert desk.out(request.uid) == before


def test_each_choice_has_its_own_prompt(desk: Desk) -> None:
    request, jobs = running(desk, n=2, prompt_logprobs=0)
    emit(desk, jobs[0], prompt="1;-1;-2;-3")
    publish(desk, owner(desk))
    emit(desk, jobs[1], prompt="1;-1;-2;-3")
    publish(desk, owner(desk))
    assert [entry.choice for entry in desk.out(request.uid) if entry.prompt_logprobs] == [0, 1]


def test_only_scored(desk: Desk) -> None:
    request, [job] = running(desk, max_tokens=0, logprobs=0, prompt_logprobs=0)
    emit(desk, job, prompt="1;-1;-2;-3")
    emit(desk, job, end="length")
    publish(desk, owner(desk), 2)
    got = whole(request, desk.out(request.uid), logprobs=0, echo=True)
    assert got["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -3.0]
    last = desk.out(request.uid)[-1]
    assert last.usage is not None
    assert (last.finish, last.usage.completion_tokens) == ("length", 0)
    desk.assert_empty()


def test_fields_stay_with_their_entries(desk: Desk) -> None:
    """Plain texts, texts with rows and ends with rows, mixed in one commit."""
    request, (first, second) = desk.running(n=2)
    desk.generate(first, 3)
    desk.generate(second, 1)
    uid = request.uid
    texts = [
        Text(uid, 0, 1, 0, "a"),
        Text(uid, 0, 2, 1, "b", '{"b":1}'),
        Text(uid, 1, 0, 0, "", "", '{"p":1}'),
        Text(uid, 0, 3, 2, "c"),
        Text(uid, 0, 4, 3, "", '{"d":1}', '{"p":2}'),
    ]
    ends = [
        desk.finished(uid, 0, 2, n=4, at=3, finish="stop"),
        desk.finished(uid, 1, 2, n=1, text="z", finish="stop", logprobs='{"z":1}', prompt_logprobs='{"p":3}'),
    ]
    call = desk.pub_call(texts, ends)
    assert desk.bus.run(call).code == "OK"
    got = [(e.choice, e.text, e.logprobs, e.prompt_logprobs) for e in desk.out(uid)[1:]]
    assert got == [
        (0, "a", "", ""),
        (0, "b", '{"b":1}', ""),
        (1, "", "", '{"p":1}'),
        (0, "c", "", ""),
        (0, "", '{"d":1}', '{"p":2}'),
        (0, "", "", ""),
        (1, "z", '{"z":1}', '{"p":3}'),
    ]
    assert desk.out(uid)[-1].end == "done"
    before = contents(desk.bus)
    assert desk.bus.run(call).code == "MOVED"
    assert contents(desk.bus) == before


def test_a_prompt_is_echoed_with_the_accepted_entry(desk: Desk) -> None:
    request = desk.queued()
    [entry] = desk.read_in()
    desk.tok_done(request, entry, (PROMPT,), echo=write_echo(CODEC, ["Hello🙂!"], [PROMPT]))
    [accepted] = desk.out(request.uid)
    assert (accepted.accepted, accepted.echo) == (4, '[["Hello🙂!",0]]')


def test_of_many_prompts_each_choice_reads_its_own(desk: Desk) -> None:
    prompts = [(HELLO,) * (100 + place) for place in range(64)]
    request = replace(desk.request(), params=SamplingParams(prompt_logprobs=0))
    desk.admit(request)
    [entry] = desk.read_in()
    desk.tok_done(request, entry, prompts)
    jobs = [Job(entry) for entry in desk.read_sched()]
    desk.open("scheduler-1")
    for job in jobs:
        desk.start(job.entry)
        emit(desk, job, prompt="1;-1")
        emit(desk, job, prompt="2;-2")
        emit(desk, job, HELLO, "length")
    before = _sent(desk)
    publish(desk, owner(desk), steps=3 * len(jobs))
    sent = _sent(desk) - before
    assert sent < 4 * len(join_prompts(prompts)) + 3 * 300 * len(jobs)  # its records come as well
    counts = dict.fromkeys(range(len(prompts)), 0)
    for published in desk.out(request.uid):
        if published.prompt_logprobs:
            stretch = orjson.loads(published.prompt_logprobs)
            assert stretch["from"] == counts[published.choice]
            counts[published.choice] += len(stretch["rows"])
    assert set(counts.values()) == {3}


def _sent(desk: Desk) -> int:
    """Bytes that the server has sent to all its clients."""
    return int(desk.bus.do("INFO", "stats").partition(b"total_net_output_bytes:")[2].split()[0])
