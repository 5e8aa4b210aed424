"""The connection a request came in on, and the news that it is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class ClientGoneError(Exception):
    """The client closed its connection: nobody is left to answer. Not an error of ours, so in no tree."""


class Line(Protocol):
    """What a client is heard on; `api.wire.Wire` is one."""

    gone: bool
    on_gone: Callable[[], None] | None


class Client:
    """Listens for the end of a connection whose request body has been read."""

    def __init__(self, line: Line) -> None:
        self._line = line

    @property
    def gone(self) -> bool:
        """Whether it has left."""
        return self._line.gone

    def on_gone(self, call: Callable[[], None]) -> None:
        """Calls ``call`` once the client is gone: at once, if it is already."""
        self._line.on_gone = call
        if self._line.gone:
            call()

    def close(self) -> None:
        """Stops listening; idempotent."""
        self._line.on_gone = None
