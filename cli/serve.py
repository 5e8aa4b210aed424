"""`millstream serve`: Redis and every role as processes of this machine, in one terminal.

Decides what runs and in which order it starts and stops; knows nothing of requests.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import shlex
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from cli.supervisor import Spec, Supervisor
from common import settings as table
from common.bus.client import Bus
from common.bus.embedded import EmbeddedRedis, EmbeddedRedisError
from common.bus.keys import Keys
from common.bus.leases import mark_dead
from common.bus.server import PARTITIONS, UnfitServerError, check_server
from common.children import Program
from common.errors import MillstreamError
from common.exitcodes import ExitCode
from common.logging import Log
from common.settings import ROLES, Command, Settings, SettingsError

_log = Log(__name__)

_TICK_S = 0.2
_READY_TIMEOUT_S = 1.0
#: Workers have nothing to finish once the API processes are gone, but must hand over what they hold.
_WORKER_GRACE_S = 5.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(settings: Settings) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code."""
    stop = _StopFlag()
    with _listen(settings) as listener:
        embedded = None if settings.redis_url else _start_redis(settings)
        try:
            redis_url = embedded.socket_url if embedded else settings.redis_url
            # The embedded server has one detokenizer: a second partition would only double its messages.
            partitions = _check_redis(redis_url, settings, new=1 if embedded else PARTITIONS)
            children = replace(
                settings, redis_url=redis_url, listen_fd=listener.fileno(), partitions=partitions
            )
            with closing(_Obituaries(children)) as obituaries:
                supervisor = Supervisor(_specs(children), on_death=obituaries.publish)
                stop.wakes(supervisor)
                return _Serving(children, supervisor, embedded, listener, stop).run()
        finally:
            if embedded is not None:
                embedded.close()
                _log.info("Redis stopped")


class _StopFlag:
    """Counts the signals that ask to stop; the second one asks to hurry."""

    def __init__(self) -> None:
        self.count = 0
        self._wake: Callable[[], None] = _nothing
        for number in _STOP_SIGNALS:
            signal.signal(number, self._handle)

    def wakes(self, supervisor: Supervisor) -> None:
        """Wake ``supervisor`` on each signal, so that it notices at once."""
        self._wake = supervisor.wake

    def hurry(self) -> bool:
        """Whether someone lost patience."""
        return self.count > 1

    def _handle(self, number: int, frame: object) -> None:
        del number, frame
        self.count += 1
        self._wake()


class _Obituaries:
    """Marks the leases of dead workers, so that others take over at once instead of when it expires (B3)."""

    def __init__(self, settings: Settings) -> None:
        self._keys = Keys(settings.key_prefix)
        self._partitions = settings.partitions
        # Impatient: while this waits nothing is restarted, and without it the lease still ends by itself.
        # One retry, since a Redis that was restarted has closed the connection, which only a use shows.
        self._bus = Bus(settings.redis_url, name="supervisor", timeout_s=1.0, retries=1)

    def publish(self, worker_id: str) -> None:
        mark_dead(self._bus, self._keys, self._partitions, worker_id)

    def close(self) -> None:
        self._bus.close()


class _Serving:
    """The running server: watch until told to stop, then stop in order."""

    def __init__(
        self,
        settings: Settings,
        supervisor: Supervisor,
        embedded: EmbeddedRedis | None,
        listener: socket.socket,
        stop: _StopFlag,
    ) -> None:
        self._settings = settings
        self._supervisor = supervisor
        self._embedded = embedded
        self._listener = listener
        self._stop = stop

    def run(self) -> int:
        """The whole life. An orderly stop is exit code 0, whatever died on the way."""
        started = time.monotonic()
        _log.info("starting", model=self._settings.served_model_name, roles=len(_specs(self._settings)))
        try:
            while not self._stop.count and self._supervisor.failure is None:
                self._supervisor.tick(_TICK_S)
                self._watch_redis()
                if not self._supervisor.proven and _is_ready(self._listener, self._settings):
                    self._supervisor.proven = True
                    _log.info("ready", seconds=time.monotonic() - started)
                    print(banner(self._settings, *self._listener.getsockname()[:2]), flush=True)
        finally:
            self._shut_down()
        return self._supervisor.failure or ExitCode.OK

    def _watch_redis(self) -> None:
        if self._embedded is not None and not self._embedded.is_alive():
            _log.warning("Redis died, starting it again with its data")
            try:
                self._embedded.start()
            except EmbeddedRedisError as error:
                _log.error("Redis does not come back", reason=error)
                self._supervisor.failure = ExitCode.FAILED

    def _shut_down(self) -> None:
        """The API first, since what it still streams needs the workers; Redis (by the caller) last."""
        _log.info("stopping", grace_s=self._settings.shutdown_grace)
        deadline = time.monotonic() + self._settings.shutdown_grace
        self._supervisor.stop(self._settings.shutdown_grace, roles=[Command.API], hurry=self._stop.hurry)
        # Closed only now: until then a new connection got an answer from a draining API process.
        self._listener.close()
        rest = max(min(_WORKER_GRACE_S, self._settings.shutdown_grace), deadline - time.monotonic())
        self._supervisor.stop(rest, hurry=self._stop.hurry)
        _log.info("all processes stopped")


def _listen(settings: Settings) -> socket.socket:
    """Bind the port once, for all API processes: one that dies loses neither the port nor its queue."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        # Not the error's own text, to which the standard library adds the address once more.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise SettingsError(f"cannot listen on {settings.host}:{settings.port}: {reason}") from None


def _start_redis(settings: Settings) -> EmbeddedRedis:
    data_dir = Path(settings.data_dir) if settings.data_dir else None
    try:
        embedded = EmbeddedRedis(
            data_dir=data_dir, maxmemory=settings.redis_maxmemory, appendfsync=settings.appendfsync
        )
        try:
            embedded.start()
        except EmbeddedRedisError:
            embedded.close()
            raise
    except (EmbeddedRedisError, OSError) as error:
        raise SettingsError(f"cannot start the embedded Valkey: {error}") from None
    _log.info("Redis started", url=embedded.url, data=embedded.data_dir, pid=embedded.pid)
    return embedded


def _check_redis(redis_url: str, settings: Settings, *, new: int) -> int:
    """How many partitions it has; ``new``: as many as a new one gets.

    Refuses a Redis that no role could work with: said once here, not once by each of them.
    """
    try:
        return check_server(redis_url, Keys(settings.key_prefix), settings.partitions, new=new)
    except UnfitServerError as error:
        raise SettingsError(error.message) from None
    except MillstreamError as error:
        _log.warning("Redis could not be checked, the roles wait for it", reason=error.message)
        return settings.partitions or new


def _specs(settings: Settings) -> list[Spec]:
    """One spec per process to run."""
    roles = [role for role in ROLES if role is not Command.API] + [Command.API] * settings.api_replicas
    return [_spec(settings, role, number) for number, role in enumerate(roles)]


def _spec(settings: Settings, role: Command, number: int) -> Spec:
    def program(worker_id: str) -> Program:
        own = replace(settings, worker_id=worker_id)
        return Program(
            [*_command(), role, *table.to_arguments(own, role)],
            env=table.child_environment(own, role),
            pass_fds=[settings.listen_fd] if role is Command.API else (),
        )

    return Spec(role, program, lambda: table.new_worker_id(role, number))


def _command() -> list[str]:
    """How to run `millstream` again: as this process was run, so that `ps` shows `millstream <role>`."""
    script = Path(sys.argv[0])
    return [sys.executable, str(script)] if script.stem == "millstream" else [sys.executable, "-m", "cli"]


def _is_ready(listener: socket.socket, settings: Settings) -> bool:
    """Whether `/ready` says 200. It is our own server that is asked, whatever name its certificate has."""
    host, port = listener.getsockname()[:2]
    connection = http.client.HTTPConnection(_reachable(host), port, timeout=_READY_TIMEOUT_S)
    if settings.ssl_certfile:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(
            _reachable(host), port, timeout=_READY_TIMEOUT_S, context=context
        )
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def banner(settings: Settings, host: str, port: int) -> str:
    """What the terminal says once everything is ready."""
    shown = _reachable(host)
    scheme = "https" if settings.ssl_certfile else "http"
    url = f"{scheme}://[{shown}]:{port}" if ":" in shown else f"{scheme}://{shown}:{port}"
    key = " -H 'Authorization: Bearer YOUR_KEY'" if _needs_key(settings, host) else ""
    body = {
        "model": settings.served_model_name,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 64,
        "stream": True,
    }
    return (
        f"\nMillstream serves {settings.served_model_name} at {url}\n\nTry it:\n"
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
        f"  -d {shlex.quote(json.dumps(body, separators=(',', ':')))}\n\nCtrl-C stops everything.\n"
    )


def _needs_key(settings: Settings, host: str) -> bool:
    """Whether a client needs an API key, as far as the settings tell: there may be keys in Redis, too."""
    if settings.auth == "auto":
        exposed = not ipaddress.ip_address(host.partition("%")[0]).is_loopback
        return exposed or bool(settings.api_keys or settings.api_key_file)
    return settings.auth == "required"


def _reachable(host: str) -> str:
    """An address a client on this machine can use for ``host``, which may stand for all addresses."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"


def _nothing() -> None:
    pass
