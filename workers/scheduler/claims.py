"""Taking choices: START for entries that were read, alone or many in one exchange; DROP for the unwanted."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from common.bus import handoffs, starting
from common.bus.client import Bus
from common.bus.keys import SCHEDULERS, Keys
from common.bus.scripts import Call
from common.bus.starting import Started
from common.bus.streams import Entry, Place
from common.errors import UnavailableError
from common.logging import Log

log = Log(__name__)

#: How many owners of a choice START may name before something is very wrong.
_OWNERS = 3


def class_of(entry: Entry) -> str:
    """The class of work whose queue an entry was in."""
    return entry.stream.rpartition(":")[2]


class Claims:
    """Of one scheduler. Raises what `Bus.run` raises."""

    def __init__(self, bus: Bus, keys: Keys, *, model: str, worker: str) -> None:
        self._bus = bus
        self._keys = keys
        self._model = model
        self._worker = worker
        #: What was started in one exchange, until it is asked for.
        self._started: dict[Place, Started] = {}

    def ask(self, entries: Sequence[Entry]) -> None:
        """STARTs in one exchange, for `claim` to find. What does not go well is asked again alone."""
        if len(entries) < 2:
            return
        with contextlib.suppress(UnavailableError):
            outcomes = self._bus.run_many([self._call(entry) for entry in entries])
            self._started = {
                entry.place: outcome
                for entry, outcome in zip(entries, outcomes, strict=True)
                if isinstance(outcome, Started) and outcome.code != "OWNER"
            }

    def forget(self) -> None:
        """What was asked for and not claimed is asked for anew next time."""
        self._started.clear()

    def claim(self, entry: Entry, *, alone: bool = False) -> Started | None:
        """START; None when the request cannot be read."""
        if (started := self._started.pop(entry.place, None)) is not None and not alone:
            return started
        owner = ""
        for _ in range(_OWNERS):
            try:
                started = self._bus.run(self._call(entry, owner, alone=alone))
            except (AttributeError, KeyError, ValueError):
                # Crashing on it would only hand it to a peer, to crash on. Its reply ends with its deadline.
                log.exception("a request cannot be read", uid=entry.uid)
                return None
            if started.code != "OWNER":
                return started
            owner = started.owner
        raise UnavailableError("A choice changes hands all the time.")

    def drop(self, entry: Entry) -> None:
        """Removes an entry that nobody wants any more."""
        self._bus.run(
            handoffs.drop(
                self._keys,
                entry.uid,
                entry.choice,
                stream=entry.stream,
                group=SCHEDULERS,
                entry=entry.id,
                model=self._model,
                cls=class_of(entry),
            )
        )

    def _call(self, entry: Entry, owner: str = "", *, alone: bool = False) -> Call[Started]:
        return starting.start(
            self._keys,
            entry.uid,
            entry.choice,
            model=self._model,
            cls=class_of(entry),
            worker=self._worker,
            owner=owner,
            alone=alone,
        )
