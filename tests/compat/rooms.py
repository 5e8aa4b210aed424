"""Environments of clients, under `.compat/`, which git ignores: made once, with what the registries offer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.helpers.stack import ROOT, clean_environment

CACHE = ROOT / ".compat"
PROGRAMS = Path(__file__).with_name("programs")
#: Nothing that a client does takes longer; every wait has a bound.
_TIMEOUT_S = 1200.0
#: How often the end of what a long one printed is shown.
_PROGRESS_S = 30.0
#: How much of what a failed one printed is shown.
_END = 6000


class FailedError(Exception):
    """A program ended with a failure; the message is the end of what it printed."""


class Room:
    """A folder with one client and all it needs. Subclasses say how it is filled."""

    def __init__(self, name: str, *packages: str) -> None:
        self.folder = CACHE / name
        self.packages = packages

    def prepare(self) -> None:
        """Installs what is not there; a change of the list of packages starts anew."""
        done = self.folder / ".installed"
        if not done.exists() or done.read_text() != repr(self.packages):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._install()
            done.write_text(repr(self.packages))

    def _install(self) -> None:
        raise NotImplementedError

    def version(self, package: str) -> str:
        """The installed version of ``package``."""
        raise NotImplementedError

    def run(self, *command: str | Path, env: Mapping[str, str] | None = None, fails: bool = False) -> str:
        """What ``command`` prints. Raises `FailedError`, unless it may fail, and when it takes too long."""
        # A client must reach nothing but the server that it is pointed at.
        quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "DO_NOT_TRACK": "1", "NO_PROXY": "*"}
        log = self.folder / "output.log"
        with log.open("wb") as output:
            running = subprocess.Popen(
                [str(word) for word in command],
                cwd=self.folder,
                env=clean_environment(**quiet, **(env or {})),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        code = _wait(running, log)
        printed = log.read_text(errors="replace")
        if code is None:
            raise FailedError(f"ended after {_TIMEOUT_S:.0f} s; it had printed:\n{printed[-_END:]}")
        if code and not fails:
            raise FailedError(printed[-_END:])
        return printed


def _wait(running: subprocess.Popen[bytes], log: Path) -> int | None:
    """The exit code; None for what took too long, and was ended with all it had started.

    Shows from time to time that it goes on.
    """
    give_up = time.monotonic() + _TIMEOUT_S
    try:
        while (left := give_up - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return running.wait(min(_PROGRESS_S, left))
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            print(f"  ... {lines[-1].strip()[-100:] if lines else ''}", flush=True)
        return None
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


class PythonRoom(Room):
    """A virtual environment."""

    @property
    def bin(self) -> Path:
        """Where its programs are."""
        return self.folder / "venv" / "bin"

    def _install(self) -> None:
        self.run(sys.executable, "-m", "venv", "--clear", "venv")
        self.run(
            self.bin / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", *self.packages
        )

    def version(self, package: str) -> str:
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        return self.run(self.bin / "python", "-c", code).strip()

    def run(self, *command: str | Path, env: Mapping[str, str] | None = None, fails: bool = False) -> str:
        path = f"{self.bin}{os.pathsep}{os.environ.get('PATH', '')}"
        return super().run(*command, env={"PATH": path, "PYTHONPATH": "", **(env or {})}, fails=fails)


class NodeRoom(Room):
    """A folder with `node_modules`."""

    def _install(self) -> None:
        (self.folder / "package.json").write_text('{"private": true, "type": "module"}')
        self.run("npm", "install", "--no-audit", "--no-fund", "--silent", *self.packages)

    def version(self, package: str) -> str:
        said = (self.folder / "node_modules" / package / "package.json").read_text()
        return str(json.loads(said)["version"])
