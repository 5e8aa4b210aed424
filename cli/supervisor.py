"""Keeps a set of processes running: starts each, restarts the ones that die, stops them in order.

Knows nothing of Redis or of what the processes do. One thread owns it; other threads and signal handlers
only put events into its queue.
"""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.children import Child, Program
from common.exitcodes import ExitCode
from common.logging import Log

_log = Log(__name__)

#: A process that ran this long before it died did not fail at its start: it comes back at once.
STABLE_S = 5.0
#: Short, since requests wait for the process; long enough to leave the machine to others.
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 3.0
#: Failed starts in a row after which the whole is given up, if it never worked.
_STARTS_BEFORE_GIVING_UP = 5


@dataclass(frozen=True, slots=True)
class Spec:
    """One process to keep running. ``program`` makes the command of one life, given its worker id."""

    role: str
    program: Callable[[str], Program]
    new_worker_id: Callable[[], str]


@dataclass(slots=True)
class _Slot:
    """The present life of a `Spec`'s process."""

    spec: Spec
    child: Child | None = None
    worker_id: str = ""
    started: float = 0.0
    quick_deaths: int = 0
    #: When to start it (again), on the monotonic clock; None while it runs.
    due: float | None = field(default_factory=time.monotonic)


class Supervisor:
    """Runs every spec as a child process until told to stop.

    ``on_death`` is called with the worker id of every process that ended, before its successor starts.
    """

    def __init__(self, specs: Sequence[Spec], *, on_death: Callable[[str], None]) -> None:
        self._slots = [_Slot(spec) for spec in specs]
        self._on_death = on_death
        self._exits: queue.SimpleQueue[Child | None] = queue.SimpleQueue()
        #: Whether all worked once: from then on nothing is given up.
        self.proven = False
        #: Why the whole cannot go on, once that is known.
        self.failure: ExitCode | None = None

    def wake(self) -> None:
        """End the present `tick` soon. May be called from a signal handler or another thread."""
        self._exits.put(None)

    def tick(self, timeout: float) -> None:
        """Start what is due and deal with deaths, for at most ``timeout`` seconds or until one event."""
        for slot in self._slots:
            if slot.due is not None and slot.due <= time.monotonic():
                self._start(slot)
        due = [slot.due - time.monotonic() for slot in self._slots if slot.due is not None]
        try:
            child = self._exits.get(timeout=max(0.0, min([timeout, *due])))
        except queue.Empty:
            return
        for slot in self._slots:
            if child is not None and slot.child is child:
                self._reap(slot, child)

    def stop(self, grace: float, *, roles: Sequence[str] | None = None, hurry: Callable[[], bool]) -> None:
        """End the processes of ``roles`` (all by default) for good: SIGTERM, and SIGKILL after ``grace``.

        ``hurry`` is asked all the time; once it says True there is no more grace.
        """
        leaving = [slot for slot in self._slots if roles is None or slot.spec.role in roles]
        for slot in leaving:
            slot.due = None
        children = [slot.child for slot in leaving if slot.child is not None]
        for child in children:
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        for child in children:
            while child.wait(0.05) is None and time.monotonic() < deadline and not hurry():
                pass
        for slot in leaving:
            if slot.child is not None and slot.child.exit_code is None:
                _log.warning("killed, did not stop in time", role=slot.spec.role, worker=slot.worker_id)
                slot.child.signal(signal.SIGKILL)
        for child in children:
            child.wait(10.0)
        for slot in leaving:
            # Forgotten here, so that its exit, still waiting in the queue, is not taken for a death.
            slot.child = None

    def pids(self, role: str) -> list[int]:
        """Process ids of a role's running processes."""
        return [
            slot.child.pid
            for slot in self._slots
            if slot.spec.role == role and slot.child is not None and slot.child.exit_code is None
        ]

    def _start(self, slot: _Slot) -> None:
        slot.worker_id = slot.spec.new_worker_id()
        slot.started, slot.due = time.monotonic(), None
        slot.child = Child(slot.spec.program(slot.worker_id), self._exits.put)
        _log.debug("started", role=slot.spec.role, pid=slot.child.pid, worker=slot.worker_id)

    def _reap(self, slot: _Slot, child: Child) -> None:
        lived = time.monotonic() - slot.started
        slot.child = None
        try:
            self._on_death(slot.worker_id)
        except Exception:
            # Its lease then ends by itself; that is slower, and no reason to leave the role dead.
            _log.exception("could not report a death", worker=slot.worker_id)
        if child.exit_code == ExitCode.USAGE:
            # It has said why; the same settings would end its successor, too.
            self.failure = ExitCode.USAGE
            return
        fenced = child.exit_code == ExitCode.RESTART and lived >= 1.0
        slot.quick_deaths = 0 if fenced or lived >= STABLE_S else slot.quick_deaths + 1
        slot.due = time.monotonic() + restart_delay(slot.quick_deaths)
        _log.warning(
            "died, starting again",
            role=slot.spec.role,
            worker=slot.worker_id,
            how=describe_exit(child.exit_code),
            lived_s=lived,
            delay_s=restart_delay(slot.quick_deaths),
        )
        if not self.proven and slot.quick_deaths >= _STARTS_BEFORE_GIVING_UP:
            _log.error("given up", role=slot.spec.role, failed_starts=slot.quick_deaths)
            self.failure = ExitCode.FAILED


def restart_delay(quick_deaths: int) -> float:
    """Seconds before the next start, after that many deaths in a row soon after a start.

    The first is free, so that a single crash (or fencing) costs no pause even for a young process.
    """
    if quick_deaths <= 1:
        return 0.0
    return float(min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** min(quick_deaths - 2, 10)))


def describe_exit(exit_code: int | None) -> str:
    """An exit code in words."""
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"
