"""API keys as they lie in Redis: one hash, from a key's id to readable JSON; of the secret only its digest.

Every API process polls them. `HDEL ms:keys <id>` takes a key away as well as REVOKE does.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import orjson

from common.bus.client import Bus
from common.bus.keys import Keys
from common.errors import MillstreamError, NotFoundError

log = logging.getLogger(__name__)

#: Every API process reads all of them every second.
MAX_KEYS = 4096
#: No number of a key is larger: as a time it is the end of the year 9999, the last that can be shown.
MAX_NUMBER = 253_402_300_799
_TENANT = re.compile(r"[A-Za-z0-9_.:@-]{0,64}")
_NUMBERS = ("requests_per_minute", "tokens_per_minute", "created", "expires", "revoked")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Who asks, and what they may. Times are Unix seconds; 0 is never, or no limit."""

    id: str
    name: str = ""
    #: Whose requests these are; "" is the default tenant. Others do not see them.
    tenant: str = ""
    #: SHA-256 of the secret, in hex. A secret is random and long, so there is nothing to guess.
    digest: str = ""
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    #: Models it may use; all, if none is named.
    models: tuple[str, ...] = ()
    created: int = 0
    expires: int = 0
    revoked: int = 0

    def __post_init__(self) -> None:
        check_tenant(self.tenant)

    @property
    def limited(self) -> bool:
        """Whether it has a rate limit."""
        return bool(self.requests_per_minute or self.tokens_per_minute)

    def holds(self, now: float) -> bool:
        """Whether it opens the door at ``now``."""
        return not self.revoked and not 0 < self.expires <= now

    def to_json(self) -> str:
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def from_json(cls, text: bytes) -> ApiKey:
        """Raises ValueError, TypeError or KeyError for what is no key; unknown fields are ignored (B10)."""
        raw: Mapping[str, Any] = orjson.loads(text)
        words = {name: raw[name] for name in ("id", "name", "tenant", "digest") if name in raw}
        numbers: dict[str, Any] = {name: int(raw.get(name, 0)) for name in _NUMBERS}
        models = raw.get("models", [])
        if not all(isinstance(word, str) for word in (*words.values(), *models)) or isinstance(models, str):
            raise ValueError("a field has the wrong type")
        possible = all(0 <= number <= MAX_NUMBER for number in numbers.values())
        if not possible or not _DIGEST.fullmatch(words["digest"]):
            raise ValueError("a field has a value that cannot be")
        return cls(**words, models=tuple(models), **numbers)


def check_tenant(tenant: str) -> None:
    """Raises ValueError for what is no name of a tenant."""
    if not _TENANT.fullmatch(tenant):
        raise ValueError("a tenant is at most 64 letters, digits and any of _.:@-")


def digest_of(secret: bytes) -> str:
    """What is kept of a secret."""
    return hashlib.sha256(secret).hexdigest()


def create(bus: Bus, keys: Keys, wanted: ApiKey) -> tuple[ApiKey, str]:
    """Puts a new key into Redis, as ``wanted`` says. Returns it with its secret, which is kept nowhere."""
    if bus.do("HLEN", keys.api_keys()) >= MAX_KEYS:
        raise MillstreamError(f"There are {MAX_KEYS} keys already: HDEL those that are revoked.")
    secret = "ms-" + secrets.token_urlsafe(32)
    key = replace(
        wanted,
        id=f"key-{secrets.token_hex(6)}",
        digest=digest_of(secret.encode()),
        created=int(time.time()),
    )
    bus.do("HSET", keys.api_keys(), key.id, key.to_json())
    return key, secret


def revoke(bus: Bus, keys: Keys, name: str) -> ApiKey:
    """Takes a key away, for good. Raises `NotFoundError`."""
    text = bus.do("HGET", keys.api_keys(), name)
    key = None if text is None else _readable(text)
    if key is None:
        raise NotFoundError(f"There is no key {name}.")
    key = replace(key, revoked=key.revoked or int(time.time()))
    bus.do("HSET", keys.api_keys(), name, key.to_json())
    return key


def parse_keys(flat: Sequence[bytes]) -> list[ApiKey]:
    """The keys in a reply to HGETALL; what cannot be read is no key."""
    found = (_readable(text) for text in flat[1::2])
    return [key for key in found if key is not None]


def _readable(text: bytes) -> ApiKey | None:
    try:
        return ApiKey.from_json(text)
    except (ValueError, TypeError, KeyError, AttributeError):
        log.warning("an API key in Redis cannot be read, so it opens nothing")
        return None
