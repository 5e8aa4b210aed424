"""`millstream api`: one API process, from its listening socket to its orderly end.

Signals only change the phase of life; requests in flight are finished within the grace, the rest is told so.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import uvicorn
import uvloop

from api.app import create_app
from api.keeping import Keeping
from api.keyring import Keyring, static_keys
from api.protocol import Protocol
from api.service import Phase, Service
from api.tls import check_certificate
from api.upkeep import Upkeep
from common import collector
from common.bus.client import AsyncBus
from common.bus.keys import Keys
from common.bus.registry import Registry
from common.bus.replies import Replies
from common.bus.server import UnfitServerError, check_server, wait_for_server
from common.errors import MillstreamError, UnavailableError
from common.exitcodes import ExitCode
from common.logging import Log
from common.settings import Settings, SettingsError

log = Log(__name__)

#: Longer than the idle time of the load balancers in front of us, which would answer 502 otherwise.
_KEEP_ALIVE_S = 90
_BACKLOG = 2048
#: What the kernel may hold for a client that does not read. By itself it would hold megabytes.
_SEND_BUFFER_BYTES = 128 << 10
#: How long requests are still taken after `/ready` said no: a load balancer needs a moment to look.
_LINGER_S = 0.5
#: Time for the last words of the streams that are cut off at the end of the grace.
_LAST_WORDS_S = 1.0
_TICK_S = 0.05
_REDIS_WAIT_S = 30.0


def run(settings: Settings) -> int:
    """The whole life of an API process; returns its exit code."""
    check_certificate(settings)
    static_keys(settings)
    try:
        settings = replace(settings, partitions=_partitions(settings))
    except UnfitServerError as error:
        log.error("cannot run with this Redis", reason=error.message)
        return ExitCode.USAGE
    except MillstreamError as error:
        log.error("cannot run without Redis unless --partitions is given", reason=error.message)
        return ExitCode.FAILED
    listener = _listen(settings)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, listener))


def _partitions(settings: Settings) -> int:
    """How many there are. Whoever was told need not wait for a Redis that is not there yet."""
    keys = Keys(settings.key_prefix)
    if not settings.partitions:
        return wait_for_server(settings.redis_url, keys, 0, timeout_s=_REDIS_WAIT_S)
    try:
        return check_server(settings.redis_url, keys, settings.partitions)
    except UnfitServerError:
        raise
    except MillstreamError as error:
        log.warning("starting without Redis, which may come later", reason=error.message)
        return settings.partitions


def _listen(settings: Settings) -> socket.socket:
    """The socket inherited from the supervisor, or one of our own."""
    listener = _inherited(settings) or _created(settings)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # so its connections have it
    return listener


def _inherited(settings: Settings) -> socket.socket | None:
    return socket.socket(fileno=settings.listen_fd) if settings.listen_fd >= 0 else None


def _created(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise SettingsError(f"cannot listen on {settings.host}:{settings.port}: {reason}") from None


async def _serve(settings: Settings, listener: socket.socket) -> int:
    bus = AsyncBus(settings.redis_url, name=settings.worker_id)
    keys = Keys(settings.key_prefix)
    replies = Replies(bus, keys, settings.partitions, name=settings.worker_id)
    # Impatient: a Redis that hangs must be known before clients have waited long for their refusal.
    looks = AsyncBus(settings.redis_url, name=f"{settings.worker_id}-look", timeout_s=1.0, retries=0)
    registry = Registry(looks, keys, max_bytes=settings.max_redis_bytes)
    host, port = listener.getsockname()[:2]
    keyring = Keyring(settings, looks, keys, exposed=not _is_loopback(host))
    service = Service(settings, keys, bus, replies, registry)
    upkeep, keeping = Upkeep(service), Keeping(service)
    server = _Server(service, keyring)
    await keyring.start()
    await registry.start()
    await upkeep.start()
    keeping.start()
    replies.start()
    collector.settle()
    log.info("listening", host=host, port=port, access=keyring.says())
    if settings.auth == "off" and not _is_loopback(host):
        log.warning("everybody who can connect may ask for anything", auth="off")
    try:
        await server.serve([listener])
    finally:
        await service.settle(_LAST_WORDS_S)
        await keeping.stop()
        await upkeep.stop()
        await registry.stop()
        await keyring.stop()
        await replies.stop()
        await looks.close()
        await bus.close()
    log.info("stopped")
    return ExitCode.OK


def _is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a socket that listens on ``host``."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


class _Server(uvicorn.Server):
    """uvicorn with our own idea of an orderly end."""

    def __init__(self, service: Service, keyring: Keyring) -> None:
        settings = service.settings
        config = uvicorn.Config(
            create_app(service, keyring, settings),
            loop="none",
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(_LAST_WORDS_S) + 1,
            ssl_certfile=settings.ssl_certfile or None,
            ssl_keyfile=settings.ssl_keyfile or None,
        )
        super().__init__(config)
        self._service = service
        self._signals = 0
        self._drain: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Instead of uvicorn's handlers, which would raise the signal again after an orderly end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        yield

    def _on_signal(self) -> None:
        self._signals += 1
        if self._drain is None:
            self._drain = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        """From "not ready" to the end of uvicorn's loop. New requests get their 503 until the very end."""
        service, grace = self._service, self._service.settings.shutdown_grace
        log.info("stopping", live=len(service.live), grace_s=grace)
        deadline = time.monotonic() + grace
        service.phase = Phase.LEAVING
        await self._wait_until(min(time.monotonic() + _LINGER_S, deadline))
        service.phase = Phase.DRAINING
        await self._wait_until(deadline - _LAST_WORDS_S, idle_is_enough=True)
        for reply in list(service.live):
            reply.fail(UnavailableError("The server is shutting down.", retry_after=1.0))
        self.should_exit = True

    async def _wait_until(self, moment: float, *, idle_is_enough: bool = False) -> None:
        while time.monotonic() < moment and self._signals < 2:
            if idle_is_enough and not self._service.live:
                return
            await asyncio.sleep(_TICK_S)
