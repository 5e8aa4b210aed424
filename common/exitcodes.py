"""What a process's exit code tells whoever started it."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every `millstream` process."""

    OK = 0  #: drained and stopped as asked
    FAILED = 1  #: broke; starting again may help
    USAGE = 2  #: its settings cannot work; starting again cannot help
    RESTART = 75  #: was fenced off or lost its state: start again at once, under a new worker id
