"""`millstream serve` as a real process, for tests that need the whole path.

Started with given flags on a free port; knows the processes by role, can kill any of them, and proves
that nothing is left behind when it stops.
"""

from __future__ import annotations

import http.client
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import redis

from common.bus.embedded import free_port
from common.settings import ENV_PREFIX
from tests.helpers.waiting import until

ROOT = Path(__file__).resolve().parents[2]
REDIS_ROLE = "redis"
REDIS_URL = ENV_PREFIX + "REDIS_URL"
_ROLES = ("api", "tokenizer", "scheduler", "detokenizer", "serve")


def millstream(*arguments: str) -> list[str]:
    """The command line of `millstream`, installed or not."""
    installed = Path(sys.executable).with_name("millstream")
    program = [str(installed)] if installed.exists() else ["-m", "cli"]
    return [sys.executable, *program, *arguments]


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without settings of ours that a developer may have exported."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)} | extra


def role_of(process: psutil.Process) -> str:
    """The role named on a process's command line; "" for strangers and processes that are gone."""
    try:
        words = process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
    if words and Path(words[0].split()[0]).name in {"valkey-server", "redis-server"}:
        return REDIS_ROLE
    for before, word in itertools.pairwise(words):
        if word in _ROLES and (before == "cli" or Path(before).name == "millstream"):
            return word
    return ""


@dataclass(frozen=True, slots=True)
class Extra:
    """A role process started beside the stack, on the same Redis."""

    process: subprocess.Popen[bytes]
    port: int


class Stack:
    """One running `millstream serve`."""

    def __init__(
        self,
        *flags: str,
        ready_timeout: float = 120.0,
        env: dict[str, str] | None = None,
        group: bool = False,
    ) -> None:
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._flags = flags
        self._env = clean_environment(**(env or {}))
        self._ready_timeout = ready_timeout
        #: In a process group of its own, as a shell would start it in a terminal.
        self._group = group
        #: CPU seconds that all processes together used until `/ready` said 200.
        self.start_cost = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._extras: list[Extra] = []
        self._folder = tempfile.TemporaryDirectory(prefix="millstream-test-")
        self._log = Path(self._folder.name) / "log"

    def start(self, *, wait: bool = True) -> Self:
        """Start, and wait for `/ready` unless told not to."""
        self._process = self._spawn("serve", "--port", str(self.port), *self._flags)
        if wait:
            try:
                self.wait_ready(self._ready_timeout)
                self.start_cost = sum(sum(process.cpu_times()[:2]) for process in self.processes())
            except BaseException:
                self.discard()
                raise
        return self

    @property
    def pid(self) -> int:
        """The supervisor's process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def redis_url(self) -> str:
        """The Redis in use, as the environment, the flags or the log say."""
        if REDIS_URL in self._env:
            return self._env[REDIS_URL]
        if "--redis-url" in self._flags:
            return self._flags[self._flags.index("--redis-url") + 1]
        found = re.search(r"Redis started url=(\S+)", self.logs())
        assert found, "no Redis was started:\n" + self.logs()
        return found[1]

    def redis(self) -> redis.Redis:
        """A client to look at (and disturb) what is in Redis; replies are text."""
        return redis.Redis.from_url(self.redis_url, decode_responses=True, socket_timeout=10)

    def logs(self) -> str:
        """All that every process printed so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def is_ready(self, port: int | None = None) -> bool:
        """Whether `/ready` says 200."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=2.0)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Wait until `/ready` says 200; fails at once if the server ended."""

        def ready_or_gone() -> bool:
            assert self._process is not None
            code = self._process.poll()
            assert code is None, f"serve ended with {code}:\n{self.logs()[-4000:]}"
            return self.is_ready()

        try:
            until(ready_or_gone, "/ready", timeout, every=0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()[-4000:]}") from None

    def processes(self) -> list[psutil.Process]:
        """Every process of the stack, the supervisor first, extras excluded."""
        try:
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def pids(self, role: str) -> list[int]:
        """Process ids of a role: api, tokenizer, scheduler, detokenizer, serve or redis."""
        return [process.pid for process in self.processes() if role_of(process) == role]

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> list[int]:
        """Send a signal to every process of a role; returns their ids."""
        pids = self.pids(role)
        assert pids, f"no {role} is running"
        for pid in pids:
            os.kill(pid, number)
        return pids

    def wait_replaced(self, role: str, old: list[int], timeout: float = 20.0) -> list[int]:
        """Wait until as many new processes of ``role`` run as there were ``old`` ones; returns their ids."""

        def replaced() -> list[int]:
            now = self.pids(role)
            return now if len(now) >= len(old) and not set(now) & set(old) else []

        return until(replaced, f"a new {role}", timeout)

    def wait_redis(self, timeout: float = 20.0) -> None:
        """Wait until Redis answers, as it does not for a moment after its process was replaced."""

        def answers() -> bool:
            with self.redis() as client:
                try:
                    return bool(client.ping())
                except redis.ConnectionError:  # a server that still loads its data says so by one of these
                    return False

        until(answers, "an answer from Redis", timeout)

    def start_role(self, role: str, *flags: str) -> Extra:
        """Start one more process of ``role`` on the same Redis; an API process gets a port of its own."""
        port = free_port() if role == "api" else 0
        own = ["--port", str(port)] if role == "api" else []
        extra = Extra(self._spawn(role, "--redis-url", self.redis_url, *own, *flags), port)
        self._extras.append(extra)
        if role == "api":
            until(lambda: self.is_ready(port), "/ready of the extra API process", 30.0)
        return extra

    def stop(self, number: signal.Signals = signal.SIGINT, timeout: float = 30.0) -> int:
        """Stop as a person would; fails if a process is left behind. Returns the exit code."""
        assert self._process is not None
        for extra in self._extras:
            extra.process.terminate()
        for extra in self._extras:
            extra.process.wait(timeout)
        everyone = self.processes()
        if self._group:
            os.killpg(self.pid, number)
        else:
            self._process.send_signal(number)
        code = self._process.wait(timeout)
        left = [process for process in everyone if process.is_running() and _still_ours(process)]
        assert not left, f"left behind: {left}\n{self.logs()[-4000:]}"
        return code

    def kill_all(self) -> None:
        """End everything at once, whatever state it is in."""
        everyone = self.processes()
        for extra in self._extras:
            extra.process.kill()
            extra.process.wait(10)
        for process in everyone:
            if process.is_running():
                process.kill()
        if self._process is not None:
            self._process.wait(10)

    def discard(self) -> None:
        """`kill_all`, and forget the log."""
        self.kill_all()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._process is not None and self._process.poll() is None:
                self.stop()
        finally:
            self.discard()

    def _spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as output:
            return subprocess.Popen(
                millstream(*arguments),
                cwd=ROOT,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0 if self._group else None,
            )


def _still_ours(process: psutil.Process) -> bool:
    """Whether a process that still exists is more than a zombie waiting for its reaper."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
