"""Starts a server for a benchmark, waits for it, reads its processes' CPU time, and stops it by its pid."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

_READY_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Server:
    """A running server and all processes under it."""

    port: int
    process: subprocess.Popen[bytes]

    def cpu_seconds(self) -> dict[str, float]:
        """User and system time so far, by the role named on each process's command line."""
        root = psutil.Process(self.process.pid)
        spent: dict[str, float] = {}
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                name = _role(process.cmdline())
                spent[name] = spent.get(name, 0.0) + times.user + times.system
        return spent


def _role(words: Sequence[str]) -> str:
    for role in ("scheduler", "detokenizer", "tokenizer", "api", "serve"):
        if role in words:
            return role
    return "redis" if words and "server" in words[0] else "other"


def free_port() -> int:
    """A loopback port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def millstream(port: int, *flags: str) -> list[str]:
    """The command line of `millstream serve`."""
    return [sys.executable, "-m", "cli", "serve", "--port", str(port), "--log-level", "warning", *flags]


@contextlib.contextmanager
def running(
    command: Sequence[str], port: int, ready: str, env: dict[str, str] | None = None
) -> Iterator[Server]:
    """The server while the block runs; ``ready`` is the path that answers 200 once it can serve."""
    process = subprocess.Popen(
        command, env={**os.environ, **(env or {})}, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_ready(port, ready, process)
        yield Server(port, process)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_ready(port: int, path: str, process: subprocess.Popen[bytes] | None = None) -> None:
    """Waits until ``path`` answers 200. Raises RuntimeError when it does not, or ``process`` has ended."""
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while not _answers(port, path):
        if (process is not None and process.poll() is not None) or time.monotonic() > deadline:
            raise RuntimeError("the server did not come up")
        time.sleep(0.05)


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2.0)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
