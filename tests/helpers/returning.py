"""Clients that come back: streams read with their ids, cut, and gone on with elsewhere."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from tests.helpers.asking import TIMEOUT_S, Body, path_of


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its id (empty without one) and its value; None for [DONE]."""

    id: str
    value: dict[str, Any] | None

    def text(self, choice: int = 0) -> str:
        """What it adds to the text of a choice."""
        said = [each for each in (self.value or {}).get("choices", ()) if each["index"] == choice]
        return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in said)


class Stream:
    """One connection that reads events; iterate, and close it whenever you like; `close_all` at the end."""

    _open: ClassVar[list[Stream]] = []

    def __init__(
        self, port: int, method: str, path: str, body: Body | None, headers: Mapping[str, str]
    ) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        data = None if body is None else json.dumps(body)
        self._connection.request(method, path, data, {"content-type": "application/json", **headers})
        self._answer = self._connection.getresponse()
        self.status = self._answer.status
        self.uid = self._answer.getheader("millstream-request") or ""
        #: The last id that was seen.
        self.last = ""
        self._open.append(self)

    @classmethod
    def close_all(cls) -> None:
        """Closes what any test left open."""
        while cls._open:
            cls._open.pop().close()

    @classmethod
    def ask(cls, port: int, body: Body, **headers: str) -> Self:
        """A generation; underscores in header names stand for dashes."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return cls(port, "POST", path_of(body), body | {"stream": True}, named)

    @classmethod
    def again(cls, port: int, name: str, after: str = "") -> Self:
        """The stream of a request that is there, from after an id."""
        headers = {"last-event-id": after} if after else {}
        return cls(port, "GET", f"/v1/streams/{name}", None, headers)

    def __iter__(self) -> Iterator[Event]:
        """Events up to [DONE], or to where the connection ends."""
        name = ""
        while line := self._line():
            if line.startswith(b"id: "):
                name = line[4:].decode().strip()
            elif line.startswith(b"data: "):
                assert self._line() == b"\n"
                self.last = name or self.last
                value = None if line == b"data: [DONE]\n" else json.loads(line[6:])
                yield Event(name, value)
                name = ""
                if value is None:
                    return
            else:
                raise AssertionError(line)

    def take(self, count: int) -> list[Event]:
        """The next events, at most ``count``."""
        return [event for _, event in zip(range(count), self, strict=False)]

    def error(self) -> dict[str, Any]:
        """The error of an answer that is no stream."""
        said: dict[str, Any] = json.loads(self._answer.read())["error"]
        return said

    def close(self) -> None:
        self._answer.close()
        self._connection.close()

    def _line(self) -> bytes:
        try:
            return self._answer.readline()
        except (ConnectionError, http.client.HTTPException):
            return b""


def text_of(events: list[Event], choice: int = 0) -> str:
    """The text of a choice that the events add up to."""
    return "".join(event.text(choice) for event in events)
