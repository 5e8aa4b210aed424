"""The servers that clients are run against, each started when it is first needed."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from tests.helpers.bombarding import FLAGS
from tests.helpers.stack import Stack
from tests.helpers.text import BUNDLED

_KINDS = {
    #: The bundled model in float32, which is what transformers is compared with.
    "model": ("--dtype", "float32", "--queue-timeout", "300", "--max-queued-requests", "256"),
    #: No model, short answers.
    "null": FLAGS,
    #: No model, and soon full: one request at a time, and one that waits.
    "busy": (
        *("--engine", "null", "--null-step-ms", "20", "--max-num-seqs", "1", "--max-queued-requests", "1"),
        *("--partitions", "1"),
    ),
}


class Servers:
    """Starts them, and stops them in the end."""

    def __init__(self) -> None:
        self._running: dict[str, Stack] = {}
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.__exit__(kind, error, trace)

    def get(self, kind: str) -> Stack:
        """The server of this kind."""
        if kind not in self._running:
            self._running[kind] = self._exits.enter_context(Stack(*_KINDS[kind]))
        return self._running[kind]

    def environment(self, kind: str, **others: str) -> dict[str, str]:
        """What a client's program is told: where the server is, and others by the name of their variable."""
        urls = {f"COMPAT_{name.upper()}_URL": self.get(other).base_url for name, other in others.items()}
        return {"COMPAT_URL": self.get(kind).base_url, "COMPAT_MODEL": BUNDLED, **urls}
