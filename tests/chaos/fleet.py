"""The processes of a chaos run: several of every role on one server, restarted when they die.

Started one by one, not by `serve`: each API process has a port of its own, deaths may go unreported (as when
a host is lost), and a process can be started with a failpoint or a mutant in it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from cli.supervisor import Spec, Supervisor
from common.bus.client import Bus
from common.bus.embedded import EmbeddedRedis
from common.bus.keys import Keys
from common.bus.leases import mark_dead
from common.children import Program
from common.errors import MillstreamError
from common.settings import Command, new_worker_id
from tests.chaos.failpoints import Failpoint
from tests.helpers.asking import request
from tests.helpers.lossy_proxy import LossyProxy
from tests.helpers.servers import binary_of
from tests.helpers.stack import ROOT, clean_environment
from tests.helpers.waiting import until

SERVERS = ("valkey", "redis7", "cluster")
WORKERS = (Command.TOKENIZER, Command.SCHEDULER, Command.DETOKENIZER)
_ROLES = (*WORKERS, Command.API)
_FENCED = "exiting, to come back under a new id"
_START_S = 120.0


@dataclass(frozen=True, slots=True)
class Shape:
    """How large the fleet is, and how it is set."""

    server: str = "valkey"
    #: Processes per role.
    replicas: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(_ROLES, 2))
    lease_ms: int = 1000
    step_ms: float = 5.0
    request_timeout_s: float = 120.0
    #: Whether a death is reported at once, as `serve` does; told the worker's id.
    reports: Callable[[str], bool] = lambda _: True
    mutant: str = ""
    engine: str = "null"
    #: Variables of every process.
    env: Mapping[str, str] = field(default_factory=dict)
    appendfsync: str = "everysec"
    #: Whether a proxy stands between the processes and the server, to lose messages when told to.
    behind_proxy: bool = False
    #: Failpoints for the first processes, by role.
    traps: Sequence[tuple[str, Failpoint]] = ()
    #: More arguments of the launcher, by role.
    launch: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: More flags of the product, by role.
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def partitions(self) -> int:
        return 4 if self.server == "cluster" else 2


@dataclass(slots=True)
class Trap:
    """A failpoint that waits for the next process of its role."""

    role: str
    point: Failpoint
    marker: Path

    def struck(self) -> list[tuple[int, str]]:
        """Process and worker ids of those in which it struck, once for each time."""
        lines = self.marker.read_text().splitlines() if self.marker.exists() else []
        return [(int(pid), worker) for pid, worker in (line.split() for line in lines)]


class Fleet:
    """Everything that runs. Use as a context manager."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.keys = Keys()
        self.server = EmbeddedRedis(
            binary=binary_of("redis7" if shape.server == "redis7" else "valkey"),
            appendfsync=shape.appendfsync,
            cluster=shape.server == "cluster",
        )
        self.proxy: LossyProxy | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="millstream-chaos-")
        self.log = Path(self._folder.name) / "log"
        self._output = self.log.open("ab")
        self._listeners: list[socket.socket] = []
        self._traps: deque[Trap] = deque()
        self._trap_count = 0
        self._versions: dict[str, str] = {}
        for role, point in shape.traps:
            self.set_trap(role, point)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self.deaths = 0

    # -- life ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.server.start()
        if self.shape.behind_proxy:
            self.proxy = LossyProxy(self.server.port, seed=1, rates={})
            self.proxy.__enter__()
        self._bus = Bus(self.server.url, name="chaos", timeout_s=1.0, retries=0)
        for _ in range(self.shape.replicas.get(Command.API, 0)):
            self._listeners.append(socket.create_server(("127.0.0.1", 0), backlog=512))
        self.ports = [listener.getsockname()[1] for listener in self._listeners]
        self._supervisor = Supervisor(self._specs(), on_death=self._on_death)
        self._supervisor.proven = True
        self._thread.start()
        try:
            self.wait_whole()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        for role in _ROLES:
            for pid in self.pids(role):
                self.send(pid, signal.SIGCONT)
        self._stopping.set()
        self._thread.join(20)
        self._supervisor.stop(0.0, hurry=lambda: True)
        for listener in self._listeners:
            listener.close()
        self._bus.close()
        if self.proxy is not None:
            self.proxy.__exit__(None, None, None)
        self.server.close()
        self._output.close()
        self._folder.cleanup()

    def _watch(self) -> None:
        while not self._stopping.is_set():
            self._supervisor.tick(0.1)

    def _on_death(self, worker_id: str) -> None:
        """Called from the supervisor's thread."""
        self.deaths += 1
        if self.shape.reports(worker_id) and not self._stopping.is_set():
            with contextlib.suppress(MillstreamError):  # Redis is away, too: the lease ends by itself
                mark_dead(self._bus, self.keys, self.shape.partitions, worker_id)

    def _specs(self) -> list[Spec]:
        return [
            self._spec(role, number) for role in _ROLES for number in range(self.shape.replicas.get(role, 0))
        ]

    def _spec(self, role: Command, number: int) -> Spec:
        return Spec(
            role,
            lambda worker_id: self._program(role, number, worker_id),
            lambda: new_worker_id(role, number),
        )

    def _program(self, role: Command, number: int, worker_id: str) -> Program:
        own: list[str] = ["--mutant", self.shape.mutant] if self.shape.mutant else []
        own += self.shape.launch.get(role, ())
        if (trap := self._trap_for(role)) is not None:
            own += ["--failpoint", str(trap.point), "--marker", str(trap.marker)]
        if version := self._versions.pop(role, ""):
            own += ["--version", version]
        words = ["-m", "tests.chaos.launcher", *own, "--"] if own else ["-m", "cli"]
        fds = [self._listeners[number].fileno()] if role is Command.API else []
        return Program(
            [sys.executable, *words, role, *self._flags(role, worker_id), *_listening(fds)],
            env=clean_environment(**self.shape.env),
            cwd=ROOT,
            output=self._output,
            pass_fds=fds,
        )

    def _flags(self, role: Command, worker_id: str) -> list[str]:
        shape = self.shape
        url = self.proxy.url if self.proxy is not None else self.server.url
        flags = ["--redis-url", url, "--partitions", str(shape.partitions), "--engine", shape.engine]
        flags += ["--lease-ms", str(shape.lease_ms), "--request-timeout", str(shape.request_timeout_s)]
        flags += ["--reply-ttl", "1200", "--worker-id", worker_id]
        if role is Command.SCHEDULER:
            flags += ["--null-step-ms", str(shape.step_ms)]
        return [*flags, *shape.flags.get(role, ())]

    # -- looking ------------------------------------------------------------------------------------------

    def redis(self) -> redis.Redis:
        return redis.Redis.from_url(self.server.url, decode_responses=True, socket_timeout=10)

    def pids(self, role: str) -> list[int]:
        return self._supervisor.pids(role)

    def worker_of(self, pid: int) -> str:
        """The worker id on a process's command line; "" when it is gone."""
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:
            return ""
        return words[words.index("--worker-id") + 1] if "--worker-id" in words else ""

    def serving(self, role: str) -> list[int]:
        """Processes of a role that have announced themselves: they have finished starting."""
        with self.redis() as client:
            return [pid for pid in self.pids(role) if client.exists(self.keys.worker(self.worker_of(pid)))]

    def wait_whole(self) -> None:
        """Waits until every process serves."""
        for role in _ROLES:
            wanted = self.shape.replicas.get(role, 0)
            try:
                until(lambda r=role, w=wanted: len(self.serving(r)) >= w, f"every {role}", _START_S)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{self.logs()[-4000:]}") from None
        for port in self.ports:
            until(lambda p=port: request(p, "GET", "/ready").status == 200, "/ready", _START_S)

    def logs(self) -> str:
        return self.log.read_text(errors="replace")

    def fenced(self) -> int:
        """How many processes ended because they had been declared dead."""
        return self.logs().count(_FENCED)

    # -- disturbing ---------------------------------------------------------------------------------------

    def send(self, pid: int, number: signal.Signals) -> None:
        """A signal to a process that may be gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def set_trap(self, role: str, point: Failpoint) -> Trap:
        """The next process of ``role`` to be started has the failpoint in it."""
        self._trap_count += 1
        trap = Trap(role, point, Path(self._folder.name) / f"trap-{self._trap_count}")
        self._traps.append(trap)
        return trap

    def set_version(self, role: str, name: str) -> None:
        """The next process of ``role`` to be started is of another version (`tests.chaos.versions`)."""
        self._versions[role] = name

    def _trap_for(self, role: str) -> Trap | None:
        for trap in list(self._traps):
            if trap.role == role:
                self._traps.remove(trap)
                return trap
        return None

    def restart_redis(self, pause_s: float) -> None:
        """kill -9 of the server, and its return with what its append-only file holds."""
        self.server.kill()
        time.sleep(pause_s)
        self.server.start()


def _listening(fds: list[int]) -> list[str]:
    return ["--listen-fd", str(fds[0])] if fds else []
