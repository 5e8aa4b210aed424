"""Which API keys open the door: those from the settings, and those in Redis, read once a second.

A request costs a look into a table here and nothing else, so strangers who guess cost Redis nothing. Once a
key was needed it stays so for the life of the process, whatever becomes of Redis and of the keys in it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from common.bus.access import ApiKey, digest_of, parse_keys
from common.bus.client import AsyncBus
from common.bus.keys import Keys
from common.errors import MillstreamError, UnauthorizedError, UnavailableError
from common.logging import Log
from common.settings import Settings, SettingsError

log = Log(__name__)

_EVERY_S = 1.0
#: What was last read of Redis's keys holds for this long when Redis does not answer any more.
_TRUST_S = 600.0
#: Who asks where no key is needed.
NOBODY = ApiKey("")


class Keyring:
    """The keys that hold now. ``exposed``: whether others than this machine can connect."""

    def __init__(
        self,
        settings: Settings,
        bus: AsyncBus,
        keys: Keys,
        *,
        exposed: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._static = {key.digest: key for key in static_keys(settings)}
        self._auth = settings.auth
        self._bus = bus
        self._name = keys.api_keys()
        self._clock = clock
        self._raw: list[bytes] | None = None
        self._stored: Mapping[str, ApiKey] = {}
        self._read_at = 0.0
        self._required = settings.auth == "required" or bool(self._static) or exposed
        self._task: asyncio.Task[None] | None = None

    @property
    def open(self) -> bool:
        """Whether anybody may ask for anything: only if that is known for sure."""
        return self._auth == "off" or (not self._required and self._raw is not None)

    def caller(self, secret: bytes | None) -> ApiKey:
        """Whose ``secret`` it is, where a key is needed.

        Raises `UnauthorizedError`, and `UnavailableError` when nobody knows.
        """
        digest = "" if secret is None else digest_of(secret)
        key = self._static.get(digest) or self._known.get(digest)
        if key is not None and key.holds(time.time()):
            return key
        if secret is None and self._required:
            raise UnauthorizedError
        if key is None and not self._is_fresh:
            raise UnavailableError("API keys cannot be read now.", retry_after=2.0)
        raise UnauthorizedError("The API key is not valid.")

    async def start(self) -> None:
        """Reads the keys, and goes on doing so. Never raises: Redis may come later."""
        if self._auth == "off":
            return
        await self.look()
        self._task = asyncio.create_task(self._loop())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def says(self) -> str:
        """Who needs a key, in words for the log."""
        if self._auth == "off":
            return "nobody needs a key"
        if self._raw is None:
            return "keys are not known yet"
        if not self._required:
            return "nobody needs a key until there is one"
        return f"a key is needed, {len(self._static) + len(self._stored)} are known"

    async def look(self) -> None:
        """Reads the keys in Redis now."""
        try:
            raw = await self._bus.do("HGETALL", self._name)
        except MillstreamError as error:
            log.debug("keys cannot be read", reason=error.message)
            return
        self._read_at = self._clock()
        if raw == self._raw:
            return
        self._raw = raw
        self._stored = {key.digest: key for key in parse_keys(raw)}
        if raw and not self._required:
            self._required = True
            log.info("a key is needed from now on")

    @property
    def _is_fresh(self) -> bool:
        return self._raw is not None and self._clock() - self._read_at < _TRUST_S

    @property
    def _known(self) -> Mapping[str, ApiKey]:
        return self._stored if self._is_fresh else {}

    async def _loop(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                await self.look()
            except Exception:
                log.exception("a look at the keys failed")


def static_keys(settings: Settings) -> list[ApiKey]:
    """The keys from the settings. Raises `SettingsError` for a file that cannot be used."""
    found = [
        ApiKey(f"static-{number}", digest=digest_of(secret.encode()))
        for number, secret in enumerate(settings.api_keys, 1)
    ]
    return found + (_from_file(settings.api_key_file) if settings.api_key_file else [])


def _from_file(name: str) -> list[ApiKey]:
    try:
        lines = Path(name).read_text("ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it must be plain ASCII"
        raise SettingsError(f"--api-key-file {name} cannot be read: {reason}") from None
    found = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        secret, tenant = words if len(words) == 2 else (words[0], "")
        try:
            if len(words) > 2:
                raise ValueError("a line is a key and, after a space, a tenant")
            found.append(ApiKey(f"file-{number}", tenant=tenant, digest=digest_of(secret.encode())))
        except ValueError as error:
            raise SettingsError(f"--api-key-file {name} line {number}: {error}") from None
    if not found:
        raise SettingsError(f"--api-key-file {name} has no key in it")
    return found
