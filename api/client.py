"""The connection a request came in on, and the news that it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive


class ClientGoneError(Exception):
    """The client closed its connection: nobody is left to answer. Not an error of ours, so in no tree."""


class Client:
    """Listens for the end of a connection whose request body has been read."""

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self._on_gone: Callable[[], None] | None = None
        self._task = asyncio.create_task(self._listen(receive))

    def on_gone(self, call: Callable[[], None]) -> None:
        """Calls ``call`` once the client is gone: at once, if it is already."""
        self._on_gone = call
        if self.gone:
            call()

    def close(self) -> None:
        """Stops listening; idempotent."""
        self._on_gone = None
        self._task.cancel()

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self._on_gone is not None:
            self._on_gone()
