"""Comments on a stream that has nothing to say, so that nothing on the way takes it for dead."""

from __future__ import annotations

import asyncio

from api.wire import Wire

#: Readers of server-sent events skip lines that begin with a colon.
COMMENT = b": keep-alive\n\n"


class KeepAlive:
    """Of one stream: a comment after at most ``interval_s`` of silence, and not before half of it; 0: never.

    A reader that does not keep up has more than enough to read, and gets none.
    """

    def __init__(self, wire: Wire, interval_s: float) -> None:
        self._wire = wire
        self._every_s = interval_s / 2
        #: Set by whoever writes an event: a timer for each would cost more than the event.
        self.spoken = True
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """From now on."""
        if self._every_s:
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self._look)

    def close(self) -> None:
        """No more comments; idempotent."""
        self._every_s = 0.0
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        if not self.spoken and not self._wire.full:
            self._wire.write(COMMENT)
        # After a comment the silence begins anew, as it does after an event.
        self.spoken = not self.spoken
        self.start()
