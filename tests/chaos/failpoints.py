"""Failpoints at both sides of every script call (and plain command) of a process, told from outside.

A failpoint names a script or command, the side (before it is sent, or after Redis has executed it), what
happens there, and at which call. It is put between the bus and the connection, so that all that the product
does about a lost message is in play.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import hiredis
import redis

from common.bus import client
from common.bus.pipeline import Pipeline
from common.bus.scripts import sha_of, source_of

#: A message and all its repeats: longer than any retrying client goes on.
_ALL_TRIES = 6


class Side(StrEnum):
    BEFORE = "before"
    AFTER = "after"


class Action(StrEnum):
    KILL = "kill"  #: the process dies here
    STOP = "stop"  #: the process stands still here until somebody continues it
    LOSE = "lose"  #: this message is lost; the next try is answered
    DOWN = "down"  #: this message and its repeats are lost, so that the caller sees an error


@dataclass(frozen=True, slots=True)
class Failpoint:
    """``call:side:action:hit``, the hit counted from 1; ``every`` repeats it, written ``hit+``."""

    call: str
    side: Side
    action: Action
    hit: int
    every: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        call, side, action, hit = text.split(":")
        return cls(call, Side(side), Action(action), int(hit.rstrip("+")), hit.endswith("+"))

    def __str__(self) -> str:
        return f"{self.call}:{self.side}:{self.action}:{self.hit}{'+' * self.every}"


class _Armed:
    """One failpoint in one process; counts calls from all threads."""

    def __init__(self, point: Failpoint, marker: Path, worker: str) -> None:
        self._point = point
        self._marker = marker
        self._worker = worker
        self._lock = threading.Lock()
        self._hits = 0
        self._left = 0
        self._unmarked = False
        self._names: dict[str, str] = {}

    def strikes(self, *commands: tuple[Any, ...]) -> bool:
        """Whether it is the turn of one of the calls in a message."""
        calls = sum(self._name(command) == self._point.call for command in commands)
        if not calls:
            return False
        with self._lock:
            if self._left:
                self._left -= 1
                return True
            hits = range(self._hits + 1, self._hits + calls + 1)
            self._hits += calls
            hit, every = self._point.hit, self._point.every
            due = any(number % hit == 0 if every else number == hit for number in hits)
            if due and self._point.action is Action.DOWN:
                self._left = _ALL_TRIES - 1
            self._unmarked |= due  # not taken back by other calls that come before the deed is done
        return due

    def act(self, side: Side) -> None:
        """Does the deed, if it is to be done at this side. Raises what a lost message raises."""
        if side is not self._point.side:
            return
        if self._unmarked:
            self._unmarked = False
            self._mark()
        match self._point.action:
            case Action.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Action.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case Action.LOSE | Action.DOWN:
                raise redis.exceptions.ConnectionError("lost by a failpoint")

    def _mark(self) -> None:
        """Says that it struck, and whom."""
        with self._marker.open("a") as file:
            file.write(f"{os.getpid()} {self._worker}\n")

    def _name(self, command: tuple[Any, ...]) -> str:
        word = str(command[0]).lower()
        if word in ("evalsha", "eval"):
            return self._scripts().get(command[1], "")
        return word

    def _scripts(self) -> dict[str, str]:
        if not self._names:
            call = self._point.call
            try:
                self._names = {sha_of(call): call, source_of(call): call}
            except FileNotFoundError:  # a plain command
                self._names = {"": ""}
        return self._names


def install(point: Failpoint, marker: Path, worker: str) -> None:
    """Puts the failpoint into this process."""
    armed = _Armed(point, marker, worker)
    _wrap_sync(armed)
    _wrap_async(armed)


def _wrap_sync(armed: _Armed) -> None:
    send: Callable[[Any, Any], None] = client._send
    receive: Callable[[Any, int], Any] = client._receive
    #: Connections on which a struck message is on its way.
    struck: set[Any] = set()

    def struck_send(connection: Any, commands: Sequence[tuple[Any, ...]]) -> None:
        """What travels together is lost together."""
        hit = armed.strikes(*commands)
        if hit:
            _act(connection, Side.BEFORE)
        send(connection, commands)
        if hit:
            struck.add(connection)

    def struck_receive(connection: Any, count: int) -> Any:
        hit = connection in struck
        struck.discard(connection)
        replies = receive(connection, count)
        if hit:
            _act(connection, Side.AFTER)
        return replies

    def _act(connection: Any, side: Side) -> None:
        try:
            armed.act(side)
        except redis.exceptions.ConnectionError:
            connection.disconnect()
            raise

    client._send = struck_send
    client._receive = struck_receive


def _wrap_async(armed: _Armed) -> None:
    ask: Any = Pipeline.ask

    async def struck(self: Pipeline, packed: bytes) -> Any:
        if not armed.strikes(_command(packed)):
            return await ask(self, packed)
        armed.act(Side.BEFORE)
        reply = await ask(self, packed)
        armed.act(Side.AFTER)
        return reply

    Pipeline.ask = struck


def _command(packed: bytes) -> tuple[Any, ...]:
    """The words of a command as the protocol writes it."""
    reader = hiredis.Reader(encoding="utf-8", errors="replace")
    reader.feed(packed)
    return tuple(reader.gets())
