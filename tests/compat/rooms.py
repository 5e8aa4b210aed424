"""Environments of clients, under `.compat/`, which git ignores: made once, with what the registries offer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.helpers.stack import ROOT, clean_environment

CACHE = ROOT / ".compat"
PROGRAMS = Path(__file__).with_name("programs")
#: Nothing that a client does takes longer; every wait has a bound.
_TIMEOUT_S = 1200.0


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
        """What ``command`` prints. Raises `FailedError` unless it may fail."""
        # A client must reach nothing but the server that it is pointed at.
        quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "DO_NOT_TRACK": "1", "NO_PROXY": "*"}
        ended = subprocess.run(
            [str(word) for word in command],
            cwd=self.folder,
            env=clean_environment(**quiet, **(env or {})),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
        if ended.returncode and not fails:
            raise FailedError(ended.stdout[-6000:])
        return ended.stdout


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
