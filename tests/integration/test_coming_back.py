"""API replicas that die, and clients that come back: elsewhere, at any point, with a key or without."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.api_process import Answer, stage
from tests.helpers.asking import Body, chat, completion, null_text, path_of, request
from tests.helpers.inside import Inside
from tests.helpers.returning import Event, Stream, text_of
from tests.helpers.stack import Extra, Stack
from tests.helpers.waiting import until

#: A generation of this many tokens takes two or three seconds.
TOKENS = 250
LONG = 3000


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack("--engine", "null", "--null-step-ms", "10") as running:
        yield running


@pytest.fixture
def inside(stack: Stack) -> Iterator[Inside]:
    with stack.redis() as client:
        inside = Inside(client)
        yield inside
        Stream.close_all()
        inside.wait_free()


@pytest.fixture
def doomed(stack: Stack) -> Iterator[Extra]:
    """An API process to be killed."""
    extra = stack.start_role("api")
    yield extra
    kill(stack, extra)


def kill(stack: Stack, extra: Extra) -> None:
    if extra in stack._extras:
        stack._extras.remove(extra)
        os.kill(extra.process.pid, signal.SIGKILL)
        extra.process.wait(10)


def body(seed: int, tokens: int = TOKENS, *, is_chat: bool = False, **fields: Any) -> Body:
    make = chat if is_chat else completion
    return make("hello", max_tokens=tokens, seed=seed, ignore_eos=True, **fields)


def post(port: int, asked: Body, **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return request(port, "POST", path_of(asked), asked, named)


def status(port: int, name: str) -> Any:
    answer = request(port, "GET", f"/v1/requests/{name}")
    assert answer.status == 200, answer
    return answer.json()


def check(events: list[Event], asked: Body) -> None:
    """One end, and the only right text of every choice."""
    assert [event.value is None for event in events] == [False] * (len(events) - 1) + [True]
    for choice in range(asked.get("n", 1)):
        assert text_of(events, choice) == null_text(asked["seed"] + choice, asked["max_tokens"])


# -- streams ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[1], [40], [3, 50, 120]])
@pytest.mark.parametrize("is_chat", [True, False])
def test_the_api_dies_and_the_stream_goes_on_elsewhere(
    stack: Stack, inside: Inside, doomed: Extra, is_chat: bool, cuts: list[int]
) -> None:
    asked = body(7, is_chat=is_chat, n=2, stream_options={"include_usage": True})
    stream = Stream.ask(doomed.port, asked, millstream_resume="30")
    events = stream.take(cuts[0])
    kill(stack, doomed)
    for count in cuts[1:]:  # once more cut off, by the client
        stream = Stream.again(stack.port, stream.uid, stream.last)
        events += stream.take(count)
        stream.close()
    events += list(Stream.again(stack.port, f"chatcmpl-{stream.uid}", stream.last))
    check(events, asked)
    assert all(event.id for event in events)
    assert len({event.id for event in events}) == len(events)


def test_every_cut_point_is_as_good_as_any(stack: Stack, inside: Inside) -> None:
    asked = body(11, 60, is_chat=True, n=2, stop=["never"], stream_options={"include_usage": True})
    stream = Stream.ask(stack.port, asked, millstream_resume="30")
    everything = list(stream)
    check(everything, asked)
    for seen, event in enumerate(everything[:-1], 1):
        assert list(Stream.again(stack.port, stream.uid, event.id)) == everything[seen:], event
    ends = [list(Stream.again(stack.port, stream.uid, after)) for after in (stream.last, "9999999999999-0")]
    assert ends == [everything[-1:]] * 2
    by_query = Stream(stack.port, "GET", f"/v1/streams/{stream.uid}?after={everything[9].id}", None, {})
    assert list(by_query) == everything[10:]


def test_a_plain_stream_has_no_ids_and_can_be_read_again(stack: Stack, inside: Inside) -> None:
    asked = body(13, 20)
    stream = Stream.ask(stack.port, asked)
    events = list(stream)
    assert {event.id for event in events} == {""}
    again = list(Stream.again(stack.port, stream.uid))
    assert [event.value for event in again] == [event.value for event in events]
    assert all(event.id for event in again)


def test_what_cannot_be_read(stack: Stack, inside: Inside) -> None:
    uid = Stream.ask(stack.port, body(1, 1)).uid
    for name in (uid[:-1] + ("0" if uid[-1] != "0" else "1"), "nonsense", "77-" + uid.partition("-")[2]):
        assert Stream.again(stack.port, name).status == 404
        assert request(stack.port, "GET", f"/v1/requests/{name}").status == 404
        assert request(stack.port, "DELETE", f"/v1/requests/{name}").status == 404
    for after in ("x", "5", "5-5-5"):
        stream = Stream.again(stack.port, uid, after)
        assert (stream.status, stream.error()["param"]) == (400, "after")


# -- keys -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_key_is_used_again_on_another_replica(
    stack: Stack, inside: Inside, doomed: Extra, is_stream: bool
) -> None:
    asked, key = body(17, stream=is_stream), f"again {is_stream}"
    admitted = inside.admissions()
    with ThreadPoolExecutor(1) as pool:
        if is_stream:
            assert len(Stream.ask(doomed.port, asked, idempotency_key=key).take(20)) == 20
        else:
            cut = pool.submit(post, doomed.port, asked, idempotency_key=key)
            until(lambda: inside.in_flight() and inside.generated(inside.only()) > 20, "it runs", 20)
        kill(stack, doomed)
        if not is_stream:
            assert isinstance(cut.exception(20), OSError)
    uid = inside.only()
    if is_stream:
        stream = Stream.ask(stack.port, asked, idempotency_key=key)
        assert stream.uid == uid
        check(list(stream), asked)
    for _ in range(1 if is_stream else 2):  # while it runs, and once it has ended
        answer = post(stack.port, asked | {"stream": is_stream}, idempotency_key=key)
        assert (answer.status, answer.headers["millstream-request"]) == (200, uid)
        if not is_stream:
            assert answer.json()["choices"][0]["text"] == null_text(17, TOKENS)
    assert inside.admissions() == admitted + 1


def test_the_same_answer_to_the_byte(stack: Stack, inside: Inside) -> None:
    asked = completion("hello", max_tokens=20)  # without a seed: one is drawn
    first = post(stack.port, asked, idempotency_key="bytes")
    turned = dict(reversed(list(asked.items())))
    assert post(stack.port, turned, idempotency_key="bytes").body == first.body
    other = post(stack.port, asked | {"max_tokens": 21}, idempotency_key="bytes")
    assert (other.status, other.error["type"]) == (409, "idempotency_error")
    other = post(stack.port, chat("hello", max_tokens=20), idempotency_key="bytes")
    assert other.status == 409


def test_an_error_is_the_same_the_second_time(stack: Stack, inside: Inside) -> None:
    asked = completion("far too many words " * 4000, max_tokens=1)
    first, second = (post(stack.port, asked, idempotency_key="error") for _ in range(2))
    assert (first.status, first.error["code"]) == (400, "context_length_exceeded")
    assert (second.status, second.body) == (first.status, first.body)
    assert second.headers["millstream-request"] == first.headers["millstream-request"]


def test_a_race_has_one_generation(stack: Stack, inside: Inside, doomed: Extra) -> None:
    with ThreadPoolExecutor(8) as pool:
        for number in range(5):
            asked, admitted = body(23 + number, 20), inside.admissions()
            answers = list(
                pool.map(
                    lambda port, asked=asked, number=number: post(
                        port, asked, idempotency_key=f"race {number}"
                    ),
                    [stack.port, doomed.port] * 4,
                )
            )
            assert len({answer.body for answer in answers}) == 1
            assert answers[0].status == 200
            assert inside.admissions() == admitted + 1


@pytest.mark.parametrize(
    "headers",
    [
        {"millstream_resume": "0"},
        {"millstream_resume": "3601"},
        {"millstream_resume": "soon"},
        {"idempotency_key": ""},
        {"idempotency_key": "x" * 256},
    ],
)
def test_headers_that_say_nothing_we_know(stack: Stack, inside: Inside, headers: dict[str, str]) -> None:
    answer = post(stack.port, body(1, 1), **headers)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


# -- what becomes of a request without a reader -----------------------------------------------------------


def wait_ended(inside: Inside, uid: str, timeout: float) -> float:
    start = time.monotonic()
    until(lambda: inside.field(uid, "state") == "ended", "it has ended", timeout)
    assert inside.field(uid, "terminal") == "error"
    return time.monotonic() - start


def test_nobody_comes_back(stack: Stack, inside: Inside) -> None:
    stream = Stream.ask(stack.port, body(31, LONG), millstream_resume="3")
    stream.take(5)
    stream.close()
    time.sleep(2)
    before = inside.generated(stream.uid)
    until(lambda: inside.generated(stream.uid) > before, "it goes on for a while")
    assert wait_ended(inside, stream.uid, 5 * 3) < 15
    inside.wait_free()
    said = status(stack.port, stream.uid)
    assert (said["state"], said["response"], said["error"]["code"]) == ("ended", None, "cancelled")
    assert said["usage"]["completion_tokens"] > 100


def test_a_reader_keeps_it_for_longer_than_it_may_be_left(stack: Stack, inside: Inside) -> None:
    stream = Stream.ask(stack.port, body(37, 500), millstream_resume="1")
    check(list(stream), body(37, 500))


def test_a_plain_request_of_a_dead_api(stack: Stack, inside: Inside, doomed: Extra) -> None:
    stream = Stream.ask(doomed.port, body(41, LONG))
    stream.take(5)
    kill(stack, doomed)
    seconds = wait_ended(inside, stream.uid, 5 * 10)
    print(f"cancelled after {seconds:.1f} s")
    assert seconds > 8
    inside.wait_free()


def test_a_reader_takes_a_plain_request_over(stack: Stack, inside: Inside, doomed: Extra) -> None:
    stream = Stream.ask(doomed.port, body(43, 4000))
    first = stream.take(5)
    kill(stack, doomed)
    reader = Stream.again(stack.port, stream.uid)
    died = time.monotonic()
    events: list[Event] = []
    for event in reader:
        events.append(event)
        if time.monotonic() > died + 14:
            break
    assert [event.value for event in events[:5]] == [event.value for event in first]
    assert text_of(events) == null_text(43, 4000)[: len(text_of(events))]
    assert inside.field(stream.uid, "state") == "running"
    reader.close()
    assert wait_ended(inside, stream.uid, 5.0 + 2) < 7


def test_a_plain_request_is_not_its_readers_to_end(stack: Stack, inside: Inside, doomed: Extra) -> None:
    stream = Stream.ask(stack.port, body(47))
    first = stream.take(5)
    for port in (doomed.port, stack.port):
        reader = Stream.again(port, stream.uid)
        reader.take(2)
        reader.close()
    check(first + list(stream), body(47))


# -- status -----------------------------------------------------------------------------------------------


def test_the_status_of_a_request(stack: Stack, inside: Inside) -> None:
    asked = body(53, n=2, is_chat=True)
    stream = Stream.ask(stack.port, asked, millstream_resume="30")
    stream.take(20)
    said = status(stack.port, f"chatcmpl-{stream.uid}")
    assert set(said) == {
        *("id", "object", "label", "model", "class", "state", "created", "started", "ended"),
        *("attempts", "choices", "usage", "error", "response"),
    }
    assert (said["id"], said["object"], said["state"]) == (stream.uid, "request", "running")
    assert (said["ended"], said["error"], said["response"], said["choices"]) == (None, None, None, 2)
    assert 0 < said["usage"]["completion_tokens"] < 2 * TOKENS
    list(stream)
    said = status(stack.port, stream.uid)
    assert said["state"] == "ended"
    assert said["created"] <= said["started"] <= said["ended"] <= time.time() + 1
    response = said["response"]
    assert (response["object"], response["id"]) == ("chat.completion", f"chatcmpl-{stream.uid}")
    texts = [choice["message"]["content"] for choice in response["choices"]]
    assert texts == [null_text(53, TOKENS), null_text(54, TOKENS)]
    assert response["usage"] == said["usage"]


@pytest.mark.parametrize(("method", "path"), [("DELETE", ""), ("POST", "/cancel")])
def test_a_request_is_cancelled_by_its_id(stack: Stack, inside: Inside, method: str, path: str) -> None:
    stream = Stream.ask(stack.port, body(59, LONG), millstream_resume="300")
    stream.take(3)
    stream.close()
    answers = [request(stack.port, method, f"/v1/requests/{stream.uid}{path}") for _ in range(2)]
    assert [answer.status for answer in answers] == [200, 200]
    assert answers[0].json()["id"] == stream.uid
    assert wait_ended(inside, stream.uid, 5.0) < 5
    after = request(stack.port, method, f"/v1/requests/{stream.uid}{path}").json()
    assert (after["state"], after["error"]["code"]) == ("ended", "cancelled")


def test_cancelling_what_has_ended_changes_nothing(stack: Stack, inside: Inside) -> None:
    stream = Stream.ask(stack.port, body(61, 5))
    check(list(stream), body(61, 5))
    assert request(stack.port, "DELETE", f"/v1/requests/{stream.uid}").json()["error"] is None
    assert status(stack.port, stream.uid)["response"]["choices"][0]["text"] == null_text(61, 5)


def test_a_full_queue_still_knows_its_keys(tmp_path: Path) -> None:
    asked, key = {"model": "test-model", "prompt": "one"}, {"idempotency-key": "k"}
    with (
        stage(tmp_path, "--max-queued-requests", "2", working=False) as full,
        ThreadPoolExecutor(2) as pool,
    ):
        first = pool.submit(full.api.post, "/v1/completions", asked, key)
        keys, bus = full.workers.keys, full.workers.bus
        queues = [keys.work_in(p, "test-model", "interactive") for p in (0, 1)]
        until(lambda: sum(bus.do("XLEN", queue) for queue in queues) == 1, "it is queued")
        other = full.api.open("/v1/completions", asked)
        until(lambda: sum(bus.do("XLEN", queue) for queue in queues) == 2, "the queue is full")
        assert full.api.post("/v1/completions", asked, {"idempotency-key": "other"}).status == 429
        second = pool.submit(full.api.post, "/v1/completions", asked, key)
        with pytest.raises(TimeoutError):
            second.result(0.5)
        full.workers.working = True
        answers = [each.result(10) for each in (first, second)]
        assert [answer.status for answer in answers] == [200, 200]
        assert answers[0].body == answers[1].body
        other.close()
