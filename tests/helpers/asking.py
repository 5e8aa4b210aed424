"""Asking a real server: whole answers and streams, read as a client would, their shape checked on the way."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.helpers.api_process import Answer
from tests.helpers.text import BUNDLED, bundled_codec
from tests.helpers.waiting import until
from workers.engine.null import token_at

Body = dict[str, Any]
#: Nothing asked here may take longer between two events; every wait has a bound.
TIMEOUT_S = 120.0


def chat(content: Any, **fields: Any) -> Body:
    """A chat of one user message, or of the messages given; greedy unless told otherwise."""
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return {"model": BUNDLED, "messages": messages, "temperature": 0, **fields}


def completion(prompt: Any, **fields: Any) -> Body:
    return {"model": BUNDLED, "prompt": prompt, "temperature": 0, **fields}


def null_text(seed: int, tokens: int) -> str:
    """What the null engine says to a request with this seed."""
    ids = [token_at(seed, index) for index in range(tokens)]
    return bundled_codec().decode(ids, skip_special_tokens=False)


def path_of(body: Body) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client has in the end, the same for streams and whole answers."""

    id: str
    texts: tuple[str, ...]
    finishes: tuple[str, ...]
    stops: tuple[str | int | None, ...]
    #: Prompt and completion tokens.
    usage: tuple[int, int]

    @property
    def text(self) -> str:
        assert len(self.texts) == 1
        return self.texts[0]

    @property
    def said(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str | int | None, ...], tuple[int, int]]:
        """All but the id, which differs between two askings."""
        return self.texts, self.finishes, self.stops, self.usage


class RefusedError(Exception):
    """The server answered with an error, in a status or in the middle of a stream."""

    def __init__(self, answer: Answer | None, error: dict[str, Any]) -> None:
        super().__init__(f"{answer.status if answer else 'stream'}: {error}")
        self.answer = answer
        self.error = error


def request(
    port: int, method: str, path: str, body: Body | None = None, headers: Mapping[str, str] | None = None
) -> Answer:
    """One request and its whole answer, whatever it is."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
        got = connection.getresponse()
        return Answer(got.status, {k.lower(): v for k, v in got.getheaders()}, got.read())
    finally:
        connection.close()


def post(port: int, body: Body) -> Answer:
    """A generation request and its whole answer, whatever it is."""
    return request(port, "POST", path_of(body), body)


def whole(port: int, body: Body) -> Reply:
    """A generation asked for in one piece. Raises `RefusedError`."""
    answer = post(port, body | {"stream": False})
    if answer.status != 200:
        raise RefusedError(answer, answer.error)
    return reply_of_answer(answer.json())


def reply_of_answer(said: dict[str, Any]) -> Reply:
    """A whole answer's facts."""
    choices = said["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    usage = said["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return Reply(
        said["id"],
        tuple(c["text"] if "text" in c else c["message"]["content"] for c in choices),
        tuple(choice["finish_reason"] for choice in choices),
        tuple(choice["stop_reason"] for choice in choices),
        (usage["prompt_tokens"], usage["completion_tokens"]),
    )


def stream(port: int, body: Body) -> Reply:
    """A generation asked for as a stream, read to its end. Raises `RefusedError`."""
    return Live(port, body).result()


def ask(port: int, body: Body) -> Reply:
    """A generation in the way that the body's `stream` says."""
    return stream(port, body) if body.get("stream") else whole(port, body)


def both(port: int, body: Body) -> Reply:
    """Asked in one piece and as a stream at the same time, which must come to the same."""
    live = Live(port, body)
    one = whole(port, body)
    assert live.result().said == one.said
    return one


def open_request(port: int, body: Body, *, receive: int = 0) -> socket.socket:
    """Sends a request and leaves the answer unread; the caller closes the socket.

    ``receive`` bounds what the system takes in for it, in bytes.
    """
    data = json.dumps(body).encode()
    connection = socket.socket()
    connection.settimeout(TIMEOUT_S)
    if receive:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    connection.connect(("127.0.0.1", port))
    head = f"POST {path_of(body)} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return connection


class Live:
    """A stream under way, read by a thread of its own."""

    def __init__(self, port: int, body: Body) -> None:
        self._body = body | {"stream": True, "stream_options": {"include_usage": True}}
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        self._started = time.monotonic()
        self._events: list[dict[str, Any]] = []
        self._times: list[float] = []
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def id(self) -> str:
        """The request's id on the bus, once the first event is here."""
        until(lambda: self._events, "an event", TIMEOUT_S, every=0.005)
        return str(self._events[0]["id"]).partition("-")[2]

    def seen(self) -> int:
        """How many events have arrived."""
        return len(self._events)

    def wait_for(self, events: int) -> None:
        """Waits until so many events have arrived; the stream must not have ended before."""
        until(lambda: len(self._events) >= events or not self._thread.is_alive(), "events", TIMEOUT_S, 0.005)
        assert len(self._events) >= events, (self._failure, self._events[-1:])

    def result(self, timeout: float = TIMEOUT_S) -> Reply:
        """The whole stream. Raises `RefusedError`, and whatever else went wrong while it was read."""
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"the stream hangs after {len(self._events)} events"
        if self._failure is not None:
            raise self._failure
        return reply_of(self._events)

    @property
    def stall(self) -> float:
        """The longest time without an event, in seconds, from the first event on."""
        return max(
            (after - before for before, after in zip(self._times, self._times[1:], strict=False)), default=0.0
        )

    def _read(self) -> None:
        try:
            headers = {"content-type": "application/json"}
            self._connection.request("POST", path_of(self._body), json.dumps(self._body), headers)
            got = self._connection.getresponse()
            if got.status != 200:
                answer = Answer(got.status, {k.lower(): v for k, v in got.getheaders()}, got.read())
                raise RefusedError(answer, answer.error)
            assert got.getheader("content-type") == "text/event-stream; charset=utf-8"
            for event in _events(got):
                self._events.append(event)
                self._times.append(time.monotonic())
        except Exception as error:
            self._failure = error
        finally:
            self._connection.close()


def _events(got: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream up to [DONE], after which nothing may come."""
    failure = None
    while line := got.readline():
        if line == b": keep-alive\n":  # a slow machine may be silent for long
            assert got.readline() == b"\n"
            continue
        assert line.startswith(b"data: "), line
        assert got.readline() == b"\n"
        if line == b"data: [DONE]\n":
            assert not got.read(), "something comes after [DONE]"
            if failure is not None:
                raise RefusedError(None, failure)
            return
        event = json.loads(line[6:])
        if "error" in event:
            failure = event["error"]
        else:
            assert failure is None, "an error is the last event"
            yield event
    raise AssertionError("the stream broke off")


def reply_of(events: Sequence[dict[str, Any]]) -> Reply:
    """A stream's events put together, as the SDKs do it."""
    *chunks, last = events
    assert last["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    stops: dict[int, Any] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        index = choice["index"]
        assert index not in finishes, "something comes after a choice's end"
        if "delta" in choice:
            assert (choice["delta"].get("role") == "assistant") == (index not in texts), "one role, first"
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        texts[index] = texts.get(index, "") + text
        if choice["finish_reason"] is not None:
            finishes[index], stops[index] = choice["finish_reason"], choice["stop_reason"]
    indices = range(len(texts))
    assert sorted(finishes) == list(indices), "every choice ends"
    return Reply(
        last["id"],
        tuple(texts[index] for index in indices),
        tuple(finishes[index] for index in indices),
        tuple(stops[index] for index in indices),
        (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]),
    )
