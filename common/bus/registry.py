"""Who is alive: models and workers as they announce themselves, and how a process reads that.

Workers renew `ms:worker:<wid>` (a TTL'd JSON text) from their lease thread; schedulers also describe their
model in `ms:models`. API processes poll both once a second, so that no request costs a look-up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import orjson

from common.bus.client import AsyncBus, Bus
from common.bus.keys import Keys
from common.errors import MillstreamError

log = logging.getLogger(__name__)

T = TypeVar("T")

TOKENIZER, SCHEDULER, DETOKENIZER, API = "tokenizer", "scheduler", "detokenizer", "api"
#: Life of a worker's announcement; it is renewed about every second.
WORKER_TTL_MS = 5000
#: Admission stops when Redis has used this share of its maxmemory (B11).
MEMORY_LIMIT = 0.8


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the API knows of a model; written by its schedulers."""

    id: str
    max_model_len: int
    vocab_size: int
    #: Seconds since the epoch, the same on every replica (the checkpoint's time).
    created: int
    #: Other names under which it is served.
    aliases: tuple[str, ...] = ()
    #: Sampling defaults from the model's generation_config.
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def from_json(cls, text: bytes) -> ModelInfo:
        raw = orjson.loads(text)
        known = {name: raw[name] for name in cls.__slots__ if name in raw}
        known["aliases"] = tuple(known.get("aliases", ()))
        return cls(**known)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One live worker, as it announced itself."""

    id: str
    role: str
    model: str
    draining: bool
    #: Role-specific readings, for `top`.
    stats: Mapping[str, Any]

    @classmethod
    def from_json(cls, worker: str, text: bytes) -> WorkerInfo:
        raw = orjson.loads(text)
        return cls(worker, raw["role"], raw["model"], bool(raw.get("draining")), raw.get("stats", {}))


def announce(
    bus: Bus, keys: Keys, *, worker: str, role: str, model: str, draining: bool, stats: Mapping[str, Any]
) -> None:
    """One sign of life, readable by all; gone by itself `WORKER_TTL_MS` after the last."""
    for command in announcement(keys, worker=worker, role=role, model=model, draining=draining, stats=stats):
        bus.do(*command)


def announcement(
    keys: Keys, *, worker: str, role: str, model: str, draining: bool, stats: Mapping[str, Any]
) -> tuple[tuple[Any, ...], ...]:
    """The commands of `announce`, for those who send them in another way."""
    text = orjson.dumps({"role": role, "model": model, "draining": draining, "stats": dict(stats)})
    return (
        ("SET", keys.worker(worker), text, "PX", WORKER_TTL_MS),
        ("SADD", keys.workers(), worker),
    )


def withdraw(bus: Bus, keys: Keys, worker: str) -> None:
    """The worker is gone: its announcement with it."""
    bus.do("DEL", keys.worker(worker))
    bus.do("SREM", keys.workers(), worker)


def serving(bus: Bus, keys: Keys, role: str, model: str = "") -> list[str]:
    """Ids of the workers of a role (and of ``model``, if named) that take work now and hold their leases.

    Announcements alone outlive a worker by seconds, in which work would be handed to it in vain.
    """
    seconds, micros = bus.do("TIME")
    now = int(seconds) * 1000 + int(micros) // 1000
    found = []
    for worker in map(bytes.decode, bus.do("SMEMBERS", keys.workers())):
        text = bus.do("GET", keys.worker(worker))
        info = _readable(partial(WorkerInfo.from_json, worker), text) if text else None
        if info is None or info.role != role or info.draining or model not in ("", info.model):
            continue
        dead, expiry = bus.do("HMGET", keys.lease(0, worker), "dead", "expiry")
        if dead is None and expiry is not None and int(expiry) > now:
            found.append(worker)
    return found


@dataclass(frozen=True, slots=True)
class View:
    """What one poll saw."""

    models: Mapping[str, ModelInfo] = field(default_factory=dict)
    workers: tuple[WorkerInfo, ...] = ()
    memory_share: float = 0.0
    #: Why this Redis must not be given requests, though it was fit when this process began; "" when it may.
    unfit: str = ""
    #: Monotonic time of the poll; 0 before the first.
    at: float = 0.0

    def resolve(self, name: str) -> ModelInfo | None:
        """The model served under ``name`` (its id or an alias)."""
        if name in self.models:
            return self.models[name]
        return next((model for model in self.models.values() if name in model.aliases), None)

    def live(self, role: str, model: str) -> list[WorkerInfo]:
        """Live workers of a role that take new work for ``model``; detokenizers serve every model."""
        return [
            worker
            for worker in self.workers
            if worker.role == role and not worker.draining and (role == DETOKENIZER or worker.model == model)
        ]


class Registry:
    """Polls who is alive; `view` is at most about a second old, `reachable` says whether Redis answered.

    ``max_bytes`` is a bound on Redis's memory of our own, beside its `maxmemory`; 0 is none.
    """

    def __init__(self, bus: AsyncBus, keys: Keys, *, every_s: float = 1.0, max_bytes: int = 0) -> None:
        self._bus = bus
        self._keys = keys
        self._every_s = every_s
        self._max_bytes = max_bytes
        self.view = View()
        self.reachable = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """First poll, then one every second in the background. Never raises: Redis may come later."""
        await self.poll()
        self._task = asyncio.create_task(self._loop())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def poll(self) -> None:
        """Reads the registry now."""
        try:
            self.view = await self._read()
        except MillstreamError as error:
            if self.reachable:
                log.warning("registry cannot be read: %s", error.message)
            self.reachable = False
        else:
            self.reachable = True

    async def _loop(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self.poll()

    async def _read(self) -> View:
        models = await self._bus.do("HGETALL", self._keys.models())
        infos = [_readable(ModelInfo.from_json, text) for text in models[1::2]]
        known = {info.id: info for info in infos if info is not None}
        workers = []
        for wid in await self._bus.do("SMEMBERS", self._keys.workers()):
            name = wid.decode()
            text = await self._bus.do("GET", self._keys.worker(name))
            if text is None:
                await self._bus.do("SREM", self._keys.workers(), name)
                continue
            worker = _readable(partial(WorkerInfo.from_json, name), text)
            if worker is not None:
                workers.append(worker)
        memory = parse_info(await self._bus.do("INFO", "memory"))
        limit = min(filter(None, (int(memory.get("maxmemory", "0")), self._max_bytes)), default=0)
        share = int(memory.get("used_memory", "0")) / limit if limit else 0.0
        unfit = eviction(memory)
        if unfit and unfit != self.view.unfit:
            log.error("no request is admitted: %s", unfit)
        workers.sort(key=lambda worker: worker.id)
        return View(known, tuple(workers), share, unfit, time.monotonic())


def _readable(parse: Callable[[bytes], T], text: bytes) -> T | None:
    """What ``parse`` makes of it; None of what it cannot read, which must not hide all the others."""
    try:
        return parse(text)
    except (ValueError, TypeError, KeyError) as error:
        log.debug("an announcement cannot be read: %s", error)
        return None


def eviction(memory: Mapping[str, str]) -> str:
    """What is wrong with the eviction policy in INFO memory, and what to do; "" when nothing is (B11)."""
    policy = memory.get("maxmemory_policy", "noeviction")
    if policy == "noeviction":
        return ""
    return (
        f"Redis may evict keys (maxmemory-policy {policy}), which would lose requests: "
        "set maxmemory-policy noeviction"
    )


def parse_info(text: bytes) -> dict[str, str]:
    """The lines of INFO as a mapping."""
    pairs = (line.partition(":") for line in text.decode().splitlines() if ":" in line)
    return {name: value for name, _, value in pairs}
