"""Who is let in: the forms of a key, the public list, and what holds while Redis comes and goes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from api.auth import is_public, secret_of
from api.charging import duration, headers_of
from api.keyring import NOBODY, Keyring, static_keys
from common.bus.access import ApiKey, digest_of, parse_keys
from common.bus.keys import Keys
from common.bus.rates import Limit, Standing
from common.errors import UnauthorizedError, UnavailableError
from common.settings import Settings, SettingsError

SECRET = b"ms-secret-of-a-key"
STORED = ApiKey("key-1", "laptop", "team-a", digest_of(SECRET), 60, 1000, ("m",), created=1)


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer ms-secret-of-a-key")],
        [(b"authorization", b"bearer ms-secret-of-a-key")],
        [(b"authorization", b"BEARER  \t ms-secret-of-a-key ")],
        [(b"x-api-key", b"ms-secret-of-a-key")],
        [(b"host", b"x"), (b"x-api-key", b" ms-secret-of-a-key\t")],
    ],
)
def test_forms_of_a_key(headers: list[tuple[bytes, bytes]]) -> None:
    assert secret_of(headers) == SECRET


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"ms-secret-of-a-key")],
        [(b"authorization", b"Basic bXMtc2VjcmV0LW9mLWEta2V5")],
        [(b"authorization", b"Bearer ms-secret-of-a-key other")],
        [(b"authorization", b"Bearer ms-secret-of-a-key, Bearer other")],
        [(b"authorization", b"Bearer: ms-secret-of-a-key")],
        [(b"authorization", "Bearer schlüssel".encode())],
        [(b"authorization", b"Bearer " + b"x" * 513)],
        [(b"authorization", b"Bearer a"), (b"authorization", b"Bearer a")],
        [(b"authorization", b"Bearer a"), (b"x-api-key", b"a")],
        [(b"x-api-key", b"a"), (b"x-api-key", b"b")],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"Bearer ms-secret-of-a-key")],
    ],
)
def test_what_is_no_key(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(UnauthorizedError):
        secret_of(headers)


def test_no_key_at_all() -> None:
    assert (
        secret_of([(b"host", b"x"), (b"x_api_key", b"a"), (b"api-key", b"a"), (b"cookie", b"key=a")]) is None
    )


@pytest.mark.parametrize(
    ("method", "path", "root", "public"),
    [
        ("GET", "/health", "", True),
        ("HEAD", "/ready", "", True),
        ("GET", "/version", "", True),
        ("POST", "/health", "", False),
        ("TRACE", "/health", "", False),
        ("OPTIONS", "/health", "", False),
        ("GET", "/health/", "", False),
        ("GET", "//health", "", False),
        ("GET", "/HEALTH", "", False),
        ("GET", "/health/../v1/models", "", False),
        ("GET", "/health", "/v1/models", False),
        ("GET", "/docs", "", False),
        ("GET", "/openapi.json", "", False),
        ("GET", "/metrics", "", False),
    ],
)
def test_the_public_list(method: str, path: str, root: str, public: bool) -> None:
    assert is_public({"method": method, "path": path, "root_path": root}) is public


def test_a_key_comes_back_from_its_text() -> None:
    assert parse_keys([b"key-1", STORED.to_json().encode()]) == [STORED]
    more = STORED.to_json()[:-1] + ',"colour":"blue"}'
    assert parse_keys([b"key-1", more.encode()]) == [STORED]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", "null", "1", '{"id":"key-1"}', '{"id":"key-1","digest":"abc"}'),
        STORED.to_json().replace('"team-a"', "7"),
        STORED.to_json().replace('"team-a"', '"a\\u0000b"'),
        STORED.to_json().replace('"expires":0', '"expires":"never"'),
        STORED.to_json().replace('"expires":0', '"expires":null'),
        STORED.to_json().replace('"expires":0', '"expires":-1'),
        STORED.to_json().replace('"requests_per_minute":60', '"requests_per_minute":-60'),
        STORED.to_json().replace('["m"]', '"m"'),
        STORED.to_json().replace('["m"]', "[1]"),
        STORED.to_json().replace(STORED.digest, STORED.digest.upper()),
    ],
)
def test_what_cannot_be_read_opens_nothing_and_hides_no_other(text: str) -> None:
    assert text != STORED.to_json()
    assert parse_keys([b"bad", text.encode(), b"key-1", STORED.to_json().encode()]) == [STORED]


class Redis:
    """The one command that a keyring asks."""

    def __init__(self, *keys: ApiKey) -> None:
        self.keys = list(keys)
        self.away = False

    async def do(self, *command: Any) -> list[bytes]:
        assert command == ("HGETALL", "ms:keys")
        if self.away:
            raise UnavailableError
        return [part for key in self.keys for part in (key.id.encode(), key.to_json().encode())]


def keyring(
    redis: Redis, *, exposed: bool = False, now: list[float] | None = None, **settings: Any
) -> Keyring:
    moment = now or [0.0]
    ring = Keyring(Settings(**settings), redis, Keys(), exposed=exposed, clock=lambda: moment[0])  # type: ignore[arg-type]
    asyncio.run(ring.look())
    return ring


def test_without_any_key_a_server_for_this_machine_is_open() -> None:
    assert keyring(Redis()).open
    assert not keyring(Redis(), exposed=True).open
    assert not keyring(Redis(), auth="required").open
    assert not keyring(Redis(), api_keys=("k",)).open
    assert not keyring(Redis(STORED)).open
    assert keyring(Redis(STORED), exposed=True, auth="off").open


def test_keys_from_settings_and_from_redis() -> None:
    ring = keyring(Redis(STORED), api_keys=("one", "two"))
    assert ring.caller(SECRET) == STORED
    assert ring.caller(b"two").id == "static-2"
    for secret in (None, b"", b"three", STORED.digest.encode(), b"key-1"):
        with pytest.raises(UnauthorizedError):
            ring.caller(secret)


@pytest.mark.parametrize("change", [{"revoked": 1}, {"expires": int(time.time()) - 1}])
def test_keys_that_hold_no_more(change: dict[str, int]) -> None:
    ring = keyring(Redis(replace(STORED, **change)))
    assert not ring.open
    with pytest.raises(UnauthorizedError):
        ring.caller(SECRET)


def test_a_key_that_will_expire_holds() -> None:
    assert keyring(Redis(replace(STORED, expires=int(time.time()) + 60))).caller(SECRET).id == "key-1"


def test_the_first_key_closes_the_door_for_good() -> None:
    redis = Redis()
    ring = keyring(redis)
    redis.keys = [STORED]
    asyncio.run(ring.look())
    assert not ring.open
    assert ring.caller(SECRET) == STORED
    redis.keys = []  # as after FLUSHALL
    asyncio.run(ring.look())
    assert not ring.open
    with pytest.raises(UnauthorizedError):
        ring.caller(SECRET)


def test_a_redis_that_is_away_locks_out_nobody_that_is_known() -> None:
    redis, now = Redis(STORED), [0.0]
    ring = keyring(redis, now=now, api_keys=("static",))
    redis.away, now[0] = True, 599.0
    asyncio.run(ring.look())
    assert ring.caller(SECRET) == STORED
    now[0] = 601.0
    with pytest.raises(UnavailableError):
        ring.caller(SECRET)
    with pytest.raises(UnauthorizedError):
        ring.caller(None)
    assert ring.caller(b"static").id == "static-1"
    assert not ring.open


def test_a_redis_that_was_never_there_opens_nothing() -> None:
    redis = Redis()
    redis.away = True
    ring = keyring(redis)
    assert not ring.open
    for secret in (None, SECRET):
        with pytest.raises(UnavailableError):
            ring.caller(secret)
    redis.away = False
    asyncio.run(ring.look())
    assert ring.open


def test_an_open_server_stays_open_while_redis_is_away() -> None:
    redis = Redis()
    ring = keyring(redis)
    redis.away = True
    asyncio.run(ring.look())
    assert ring.open
    assert NOBODY.tenant == ""


def test_a_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\none\ntwo team-b\n")
    found = static_keys(Settings(api_key_file=str(file)))
    assert [(key.id, key.tenant, key.digest) for key in found] == [
        ("file-3", "", digest_of(b"one")),
        ("file-4", "team-b", digest_of(b"two")),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no key in it"),
        ("# nothing\n", "has no key in it"),
        ("a b c\n", "line 1: a line is a key and, after a space, a tenant"),
        ("a\nb team/c\n", "line 2: a tenant is at most 64"),
        ("schlüssel\n", "must be plain ASCII"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(SettingsError, match=says):
        static_keys(Settings(api_key_file=str(file)))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        static_keys(Settings(api_key_file=str(tmp_path / "none")))


@pytest.mark.parametrize(
    ("millis", "text"),
    [
        *((0, "0ms"), (12, "12ms"), (999, "999ms"), (1000, "1s"), (1500, "1.5s"), (59_999, "59.999s")),
        *((60_000, "1m0s"), (360_000, "6m0s"), (61_250, "1m1.25s"), (3_605_000, "1h0m5s")),
    ],
)
def test_lengths_of_time(millis: int, text: str) -> None:
    assert duration(millis) == text


def test_only_limits_that_exist_are_told() -> None:
    standing = Standing("", 0, Limit(60, 59, 1000), Limit(0, 0, 0))
    assert headers_of(standing) == [
        (b"x-ratelimit-limit-requests", b"60"),
        (b"x-ratelimit-remaining-requests", b"59"),
        (b"x-ratelimit-reset-requests", b"1s"),
    ]
