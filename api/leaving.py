"""What becomes of a request when its reader leaves: its end, or a while in which somebody may come back."""

from __future__ import annotations

import asyncio

from api.service import Service
from common.bus import handoffs
from common.bus.holding import Hold, attach
from common.errors import MillstreamError
from common.logging import Log
from common.messages import Request

log = Log(__name__)

#: Tries to tell Redis, should it be away, and the pause between them.
_TRIES, _PAUSE_S = 30, 1.0
#: Every process renews what it holds within this time.
_RENEWED_S = 1.2
_GONE = "The client closed the connection."


async def cancel(service: Service, request: Request, *, abandoned: bool = False) -> None:
    """Ends a request that nobody waits for. Keeps trying for a while when Redis does not answer.

    ``abandoned``: unless another process holds it.
    """
    call = service.cancelling(
        request.uid, model=request.model, cls=request.cls, message=_GONE, abandoned=abandoned
    )
    for _ in range(_TRIES):
        try:
            code = await service.bus.run(call)
        except MillstreamError as error:
            log.warning("could not cancel yet", uid=request.uid, error=error.message)
            await asyncio.sleep(_PAUSE_S)
        else:
            log.debug("cancelled", uid=request.uid, code=code)
            return


async def pause(service: Service, request: Request, *, on: bool) -> None:
    """Asks the scheduler to pause the request, or to go on with it. One try."""
    try:
        await service.bus.run(handoffs.pause(service.keys, request.uid, on=on))
    except MillstreamError as error:
        log.warning("could not pause or resume", uid=request.uid, error=error.message)


async def let_go(service: Service, request: Request, hold_ms: int) -> None:
    """From now on the request is held for ``hold_ms`` and no longer, unless somebody else reads it.

    It goes on if it was paused for its reader. One try: what was last said of it runs out by itself.
    """
    hold = Hold(request.uid, request.choices, hold_ms, request.idem)
    try:
        await service.bus.run(attach(service.keys, (hold,), int(service.settings.reply_ttl * 1000)))
    except MillstreamError as error:
        log.debug("could not let go", uid=request.uid, error=error.message)
    await pause(service, request, on=False)


async def give_up(service: Service, request: Request) -> None:
    """Ends a request whose own API process is gone, unless a reader elsewhere renews its hold."""
    await let_go(service, request, 0)
    await asyncio.sleep(_RENEWED_S)
    await cancel(service, request, abandoned=True)
