"""What one API process works with: settings, connections, a view of who is alive, its phase of life.

Nothing here could not be rebuilt by another process from Redis (P3).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from enum import Enum
from typing import Any

from api.house import House
from api.pressure import FinishRate
from api.replies import Reply
from common.bus import handoffs
from common.bus.client import AsyncBus
from common.bus.keys import Keys
from common.bus.registry import DETOKENIZER, MEMORY_LIMIT, SCHEDULER, TOKENIZER, ModelInfo, Registry
from common.bus.replies import Replies
from common.bus.scripts import Call
from common.messages import GENERATIONS, Kind
from common.settings import Settings

#: A view older than this is no view: Redis hangs, or this process did.
_STALE_S = 10.0
#: A view younger than this is not worth another look, and no look takes longer than that.
_FRESH_S, _LOOK_S = 0.2, 2.0
_GENERATION_ROLES = (TOKENIZER, SCHEDULER, DETOKENIZER)


class Phase(Enum):
    """Phases of an API process's life."""

    #: Takes requests.
    SERVING = "serving"
    #: Still takes requests, but says it is not ready, so that a load balancer turns away.
    LEAVING = "leaving"
    #: Finishes what it has and takes nothing new.
    DRAINING = "draining"


class Service:
    """The process as its routes see it."""

    def __init__(
        self, settings: Settings, keys: Keys, bus: AsyncBus, replies: Replies, registry: Registry
    ) -> None:
        self.settings = settings
        self.keys = keys
        self.bus = bus
        self.replies = replies
        self.registry = registry
        self.rate = FinishRate()
        self.house = House(settings)
        self.phase = Phase.SERVING
        #: Requests being answered here.
        self.live: set[Reply] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._look: asyncio.Task[None] | None = None

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs ``work`` behind the back of a request, and holds on to it until it is done."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self, timeout_s: float) -> None:
        """Waits for what was left for later, within bounds."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def cancelling(
        self, uid: str, *, model: str, cls: str, message: str, abandoned: bool = False
    ) -> Call[str]:
        """CANCEL of a request. ``abandoned``: unless somebody holds it."""
        return handoffs.cancel(
            self.keys,
            uid,
            model=model,
            cls=cls,
            ttl_ms=int(self.settings.reply_ttl * 1000),
            error="cancelled",
            message=message,
            abandoned=abandoned,
        )

    @property
    def id(self) -> str:
        """The name under which requests are ours."""
        return self.settings.worker_id

    @property
    def redis_answers(self) -> bool:
        """Whether Redis answered lately."""
        return self.registry.reachable and time.monotonic() - self.registry.view.at < _STALE_S

    async def look_again(self) -> None:
        """Makes the view of who is alive a fresh one, before something is refused because of it.

        Callers share one look, so a flood of hopeless requests costs nothing.
        """
        if time.monotonic() - self.registry.view.at < _FRESH_S:
            return
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self.registry.poll())
        await asyncio.wait([self._look], timeout=_LOOK_S)

    @property
    def memory_is_short(self) -> bool:
        """Whether Redis is too full to admit more (B11)."""
        return self.registry.view.memory_share >= MEMORY_LIMIT

    def rows(self, model: str) -> int:
        """How many generations for ``model`` can run at once; 0 when its schedulers do not say."""
        said = [worker.stats.get("rows") for worker in self.registry.view.live(SCHEDULER, model)]
        return sum(rows for rows in said if isinstance(rows, int))

    def missing_roles(self, model: ModelInfo, kind: Kind = Kind.CHAT) -> list[str]:
        """Roles without a live worker, of those that a request of ``kind`` needs."""
        roles = _GENERATION_ROLES if kind in GENERATIONS else (TOKENIZER,)
        return [role for role in roles if not self.registry.view.live(role, model.id)]

    def why_not_ready(self) -> list[str]:
        """Reasons to send requests elsewhere; none once any model can be served."""
        if self.phase is not Phase.SERVING:
            return ["shutting down"]
        if not self.redis_answers:
            return ["Redis does not answer"]
        if self.registry.view.unfit:
            return [self.registry.view.unfit]
        models = self.registry.view.models
        if not models:
            return ["no model is loaded"]
        missing = {model.id: self.missing_roles(model) for model in models.values()}
        if not all(missing.values()):
            return []
        return [f"{name}: no live {role}" for name, roles in sorted(missing.items()) for role in roles]
