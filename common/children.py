"""Child processes that never outlive their parent, even when it is killed with SIGKILL.

Knows nothing of what the children are. On systems other than Linux a child outlives a killed parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_TETHER = str(Path(__file__).with_name("tether.py"))
_SPAWN_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Program:
    """What to run: in its own process group, so that Ctrl-C in a terminal reaches the parent alone."""

    argv: Sequence[str]
    #: None inherits the parent's environment.
    env: Mapping[str, str] | None = None
    cwd: Path | None = None
    #: Where stdout and stderr go; None passes them through.
    output: IO[bytes] | None = None
    #: File descriptors the child inherits under the same numbers.
    pass_fds: Sequence[int] = ()


class Child:
    """One running child.

    The kernel kills a child when the *thread* that started it ends, so each child has a thread of its own
    that starts it, waits for it and then says that it is gone: that thread cannot end before the child.
    """

    def __init__(self, program: Program, on_exit: Callable[[Child], None] | None = None) -> None:
        self._program = program
        self._on_exit = on_exit
        self._started = threading.Event()
        self._gone = threading.Event()
        self._error: OSError | None = None
        self._process: subprocess.Popen[bytes] | None = None
        threading.Thread(target=self._run, name=f"child {program.argv[0]}", daemon=True).start()
        if not self._started.wait(_SPAWN_TIMEOUT_S):
            raise TimeoutError(f"{program.argv[0]} could not be started in {_SPAWN_TIMEOUT_S:g} s")
        if self._error is not None:
            raise self._error

    @property
    def pid(self) -> int:
        """The process id, also after the end."""
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; the exit code, or minus the signal that killed it."""
        return self._process.returncode if self._process is not None and self._gone.is_set() else None

    def wait(self, timeout: float) -> int | None:
        """Wait for the end: the exit code, or None if it still runs after ``timeout`` seconds."""
        self._gone.wait(timeout)
        return self.exit_code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a child that is gone is left alone."""
        if self._process is not None and not self._gone.is_set():
            self._process.send_signal(number)

    def stop(self, grace: float) -> int | None:
        """SIGTERM, then SIGKILL after ``grace`` seconds. Returns the exit code."""
        self.signal(signal.SIGTERM)
        if self.wait(grace) is None:
            self.signal(signal.SIGKILL)
        return self.wait(_SPAWN_TIMEOUT_S)

    def _run(self) -> None:
        program = self._program
        # Isolated and without site: the tether needs the standard library only, and starts faster so.
        tether = [sys.executable, "-I", "-S", _TETHER, str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                [*tether, *program.argv],
                env=program.env,
                cwd=program.cwd,
                stdin=subprocess.DEVNULL,
                stdout=program.output,
                stderr=program.output,
                pass_fds=program.pass_fds,
                process_group=0,
            )
        except OSError as error:
            self._error = error
            return
        finally:
            self._started.set()
        self._process.wait()
        self._gone.set()
        if self._on_exit is not None:
            self._on_exit(self)
