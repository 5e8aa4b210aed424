"""The supervisor with small real children: restarts, fresh worker ids, death reports, orderly ends."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from cli.supervisor import Spec, Supervisor, restart_delay
from common.children import Child, Program
from common.exitcodes import ExitCode
from tests.helpers.stack import ROOT

SLEEPER = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"


def spec(role: str, code: str) -> Spec:
    """A role whose process runs ``code`` with its worker id as argument."""
    numbers = itertools.count()
    return Spec(role, lambda w: Program([sys.executable, "-c", code, w]), lambda: f"{role}-{next(numbers)}")


class Running:
    """A supervisor under test with what it reported."""

    def __init__(self, *specs: Spec, on_death: Callable[[str], None] | None = None) -> None:
        self.deaths: list[str] = []
        self.supervisor = Supervisor(specs, on_death=on_death or self.deaths.append)

    def tick_until(self, condition: Callable[[], object], timeout: float = 10.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline
            self.supervisor.tick(0.05)

    def worker_id(self, role: str) -> str:
        return psutil.Process(self.supervisor.pids(role)[0]).cmdline()[-1]

    def started(self, role: str) -> int:
        """The process id of a role's process once it runs its own program and not its tether."""
        self.tick_until(lambda: self.supervisor.pids(role))
        pid = self.supervisor.pids(role)[0]
        self.tick_until(lambda: self._runs_its_own(pid))
        return pid

    @staticmethod
    def _runs_its_own(pid: int) -> bool:
        line = psutil.Process(pid).cmdline()  # empty while one program gives way to the next
        return bool(line) and "tether" not in " ".join(line)


@pytest.fixture
def run() -> Iterator[Callable[..., Running]]:
    every: list[Running] = []

    def start(*specs: Spec, **options: Callable[[str], None]) -> Running:
        every.append(Running(*specs, **options))
        return every[-1]

    yield start
    for each in every:
        each.supervisor.stop(0.0, hurry=lambda: True)


def test_a_killed_process_comes_back_at_once_under_a_new_id(run: Callable[..., Running]) -> None:
    running = run(spec("a", SLEEPER), spec("b", SLEEPER))
    first, other = running.started("a"), running.started("b")
    assert running.worker_id("a") == "a-0"
    os.kill(first, signal.SIGKILL)
    before = time.monotonic()
    running.tick_until(lambda: running.supervisor.pids("a") not in ([], [first]))
    assert time.monotonic() - before < 1.0
    running.started("a")
    assert running.worker_id("a") == "a-1"
    assert running.deaths == ["a-0"]
    assert running.supervisor.pids("b") == [other]
    assert running.supervisor.failure is None


def test_a_stopped_process_is_not_taken_for_dead(run: Callable[..., Running]) -> None:
    running = run(spec("a", SLEEPER))
    pid = running.started("a")
    os.kill(pid, signal.SIGSTOP)
    running.supervisor.tick(0.3)
    assert running.supervisor.pids("a") == [pid]
    assert running.deaths == []


def test_death_is_reported_before_the_successor_starts(run: Callable[..., Running]) -> None:
    seen: list[list[int]] = []
    running = run(spec("a", SLEEPER), on_death=lambda worker: seen.append(running.supervisor.pids("a")))
    os.kill(running.started("a"), signal.SIGKILL)
    running.tick_until(lambda: seen)
    assert seen == [[]]


def test_a_failing_death_report_does_not_keep_the_role_dead(run: Callable[..., Running]) -> None:
    def broken(worker: str) -> None:
        raise ConnectionError(worker)

    running = run(spec("a", SLEEPER), on_death=broken)
    first = running.started("a")
    os.kill(first, signal.SIGKILL)
    running.tick_until(lambda: running.supervisor.pids("a") not in ([], [first]))


def test_a_process_that_dies_at_its_start_comes_back_more_slowly(run: Callable[..., Running]) -> None:
    running = run(spec("a", "raise SystemExit(1)"))
    running.supervisor.proven = True
    end = time.monotonic() + 2.0
    running.tick_until(lambda: time.monotonic() > end)
    # Starts at 0, 0, 0.5 and 1.5 s, plus the time each takes.
    assert 2 <= len(running.deaths) <= 4
    assert [restart_delay(deaths) for deaths in range(7)] == [0, 0, 0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_fenced_process_always_comes_back_at_once(run: Callable[..., Running]) -> None:
    running = run(spec("a", f"import time; time.sleep(1.1); raise SystemExit({ExitCode.RESTART:d})"))
    for deaths in (1, 2, 3):
        running.tick_until(lambda n=deaths: len(running.deaths) == n)
        died = time.monotonic()
        running.tick_until(lambda: running.supervisor.pids("a"))
        assert time.monotonic() - died < 0.4


def test_settings_that_cannot_work_end_it_all(run: Callable[..., Running]) -> None:
    running = run(spec("a", f"raise SystemExit({ExitCode.USAGE:d})"), spec("b", SLEEPER))
    running.tick_until(lambda: running.supervisor.failure is not None)
    assert running.supervisor.failure is ExitCode.USAGE


def test_what_never_worked_is_given_up(run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.supervisor._FIRST_DELAY_S", 0.01)
    running = run(spec("a", "raise SystemExit(1)"))
    running.tick_until(lambda: running.supervisor.failure is not None)
    assert running.supervisor.failure is ExitCode.FAILED
    assert len(running.deaths) == 5


def test_stopping_ends_all_and_starts_none(run: Callable[..., Running]) -> None:
    running = run(spec("a", SLEEPER), spec("b", SLEEPER), spec("c", STUBBORN))
    pids = [running.started(role) for role in "abc"]
    time.sleep(0.2)  # c needs a moment to become stubborn
    before = time.monotonic()
    running.supervisor.stop(0.5, hurry=lambda: False)
    assert time.monotonic() - before < 2.0
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    running.supervisor.tick(0.1)
    running.supervisor.tick(0.1)
    assert not [pid for role in "abc" for pid in running.supervisor.pids(role)]
    assert running.deaths == []


def test_roles_can_be_stopped_one_by_one(run: Callable[..., Running]) -> None:
    running = run(spec("a", SLEEPER), spec("b", SLEEPER))
    running.started("a")
    pid = running.started("b")
    running.supervisor.stop(1.0, roles=["a"], hurry=lambda: False)
    assert running.supervisor.pids("a") == []
    assert running.supervisor.pids("b") == [pid]


def test_impatience_cuts_the_grace(run: Callable[..., Running]) -> None:
    running = run(spec("a", STUBBORN))
    running.started("a")
    before = time.monotonic()
    running.supervisor.stop(30.0, hurry=lambda: time.monotonic() - before > 0.2)
    assert time.monotonic() - before < 3.0


def test_children_go_with_a_killed_parent() -> None:
    code = (
        "import sys, time; from common.children import Child, Program\n"
        "child = Child(Program([sys.executable, '-c', 'import time; time.sleep(60)']))\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait(10)
        child.wait(timeout=5)


def test_a_child_outlives_the_thread_that_asked_for_it() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        child = pool.submit(Child, Program([sys.executable, "-c", SLEEPER])).result()
    try:
        assert child.wait(0.5) is None
    finally:
        assert child.stop(1.0) == -signal.SIGTERM
