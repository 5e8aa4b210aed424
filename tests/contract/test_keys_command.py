"""`millstream keys`, on real servers: what it writes, what it prints, what it refuses."""

from __future__ import annotations

import json
import time

import pytest

from cli import main
from common.bus import access
from common.bus.access import MAX_KEYS, ApiKey, digest_of
from common.bus.client import Bus
from common.bus.keys import Keys

KEYS = Keys().api_keys()


def run(bus: Bus, *arguments: str) -> int:
    return main.main(["keys", *arguments, "--redis-url", bus.url])


def stored(bus: Bus) -> dict[str, dict[str, object]]:
    flat = bus.do("HGETALL", KEYS)
    return {k.decode(): json.loads(v) for k, v in zip(flat[::2], flat[1::2], strict=True)}


def test_a_key_is_made_and_its_secret_shown_once(bus: Bus, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--name",
        "Ada's laptop",
        "--tenant",
        "team-a",
        "--models",
        "m,n",
        "--requests-per-minute",
        "60",
    )
    assert run(bus, "create", *options, "--tokens-per-minute", "9000", "--expires-in", "2h") == 0
    said = capsys.readouterr()
    secret = said.out.strip()
    assert len(secret) >= 40
    [(name, fields)] = stored(bus).items()
    assert name in said.err
    assert secret not in str(fields)
    moment = time.time()
    assert abs(int(str(fields.pop("created"))) - moment) < 60
    assert abs(int(str(fields.pop("expires"))) - moment - 7200) < 60
    assert fields == {
        "id": name,
        "name": "Ada's laptop",
        "tenant": "team-a",
        "digest": digest_of(secret.encode()),
        "requests_per_minute": 60,
        "tokens_per_minute": 9000,
        "models": ["m", "n"],
        "revoked": 0,
    }


def test_no_two_are_the_same(bus: Bus, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        run(bus, "create")
    assert len(set(capsys.readouterr().out.split())) == 3
    assert len(stored(bus)) == 3


def test_a_moment_that_cannot_be_shown(bus: Bus, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bus, "create", "--expires-in", "999999999d") == 2
    assert "--expires-in must end before the year 10000" in capsys.readouterr().err
    assert stored(bus) == {}
    run(bus, "create", "--expires-in", "2900000d")
    [(name, fields)] = stored(bus).items()
    bus.do("HSET", KEYS, "other", json.dumps(fields | {"id": "other", "expires": 10**15}))
    assert run(bus, "list") == 0
    said = capsys.readouterr().out
    assert name in said
    assert "other" not in said, "as what cannot be read"


def test_a_revoked_key_stays_revoked(bus: Bus, capsys: pytest.CaptureFixture[str]) -> None:
    run(bus, "create")
    [name] = stored(bus)
    assert run(bus, "revoke", name) == 0
    first = stored(bus)[name]["revoked"]
    assert abs(int(str(first)) - time.time()) < 60
    bus.do("HSET", KEYS, name, json.dumps(stored(bus)[name] | {"revoked": 5}))
    assert run(bus, "revoke", name) == 0
    assert stored(bus)[name]["revoked"] == 5
    capsys.readouterr()
    run(bus, "list")
    assert "revoked 1970-01-01T00:00:05Z" in capsys.readouterr().out


def test_the_list(bus: Bus, capsys: pytest.CaptureFixture[str]) -> None:
    run(bus, "list")
    assert capsys.readouterr().out.split() == list(main.keys._HEADINGS)
    for number, key in enumerate(
        (ApiKey("", "one"), ApiKey("", "two", expires=9), ApiKey("", "three", requests_per_minute=7))
    ):
        made, _ = access.create(bus, Keys(), key)
        bus.do("HSET", KEYS, made.id, json.dumps(stored(bus)[made.id] | {"created": number}))
    bus.do("HSET", KEYS, "broken", "{")
    capsys.readouterr()
    assert run(bus, "list") == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()[1:]]
    assert [row[1] for row in rows] == ["one", "two", "three"]
    assert [row[7] for row in rows] == ["active", "expired", "active"]
    assert rows[2][3] == "7"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--tenant", "a b"), "a tenant is at most 64 letters, digits and any of _.:@-"),
        (("--requests-per-minute", "0"), "--requests-per-minute must be a whole number from 1"),
        (("--tokens-per-minute", "many"), "--tokens-per-minute must be a whole number from 1"),
        (("--expires-in", "soon"), "--expires-in must be a time like 90d, 12h, 30m or 45s, not 'soon'"),
        (("--name", "a\nb"), "--name must be at most 100 printable characters"),
    ],
)
def test_options_that_cannot_be(
    bus: Bus, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], says: str
) -> None:
    assert run(bus, "create", *options) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"millstream keys: {says}")
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert stored(bus) == {}


def test_what_cannot_be_done_is_said(bus: Bus, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bus, "revoke", "key-none") == 1
    assert capsys.readouterr().err == "millstream keys: There is no key key-none.\n"
    assert main.main(["keys", "list", "--redis-url", "redis://127.0.0.1:1"]) == 1
    assert "Redis cannot be reached" in capsys.readouterr().err


def test_keys_are_bounded(bus: Bus, capsys: pytest.CaptureFixture[str]) -> None:
    bus.do("HSET", KEYS, *(word for number in range(MAX_KEYS) for word in (f"key-{number}", "{}")))
    assert run(bus, "create") == 1
    assert f"There are {MAX_KEYS} keys already" in capsys.readouterr().err
    assert bus.do("HLEN", KEYS) == MAX_KEYS
