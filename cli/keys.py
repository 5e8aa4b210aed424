"""`millstream keys`: API keys in Redis, made, listed and taken away.

Running servers notice within a second or two.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

from common.bus import access
from common.bus.access import ApiKey
from common.bus.client import Bus
from common.bus.keys import Keys
from common.errors import MillstreamError
from common.exitcodes import ExitCode
from common.kinds import count
from common.settings import Settings, SettingsError

_ACTIONS = {
    "create": "Make a key and print its secret, which is not kept.",
    "list": "Show all keys, without their secrets.",
    "revoke": "Take a key away.",
}
#: Options of `create`: what each is called in help, and what it means.
_OPTIONS = {
    "name": ("NAME", "What people call it."),
    "tenant": (
        "TENANT",
        "Whose requests these are; tenants do not see each other's. Default: the default tenant.",
    ),
    "models": ("MODELS", "Models it may use, separated by commas. Default: all."),
    "requests_per_minute": ("COUNT", "Most requests per minute. Default: no limit."),
    "tokens_per_minute": ("COUNT", "Most tokens of prompts and answers per minute. Default: no limit."),
    "expires_in": ("TIME", "When it ends: 90d, 12h, 30m, 45s. Default: never."),
}
_HEADINGS = ("ID", "NAME", "TENANT", "REQUESTS/MIN", "TOKENS/MIN", "MODELS", "CREATED", "STATE")
_UNITS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}


def add_actions(
    parser: argparse.ArgumentParser, add_settings: Callable[[argparse.ArgumentParser], None]
) -> None:
    """The actions as commands of ``parser``, each of which takes the settings as well."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, about in _ACTIONS.items():
        subparser = actions.add_parser(action, help=about, description=about, allow_abbrev=False)
        if action == "create":
            for name, (shown, meaning) in _OPTIONS.items():
                subparser.add_argument("--" + name.replace("_", "-"), metavar=shown, help=meaning)
        if action == "revoke":
            subparser.add_argument("id", metavar="ID", help="As `millstream keys list` shows it.")
        add_settings(subparser)


def run(settings: Settings, arguments: Mapping[str, Any]) -> int:
    """Does what the command line says. Returns the exit code."""
    with closing(Bus(settings.redis_url, name="keys", retries=1)) as bus:
        try:
            _ACT[arguments["action"]](bus, Keys(settings.key_prefix), arguments)
        except MillstreamError as error:
            print(f"millstream keys: {error.message}", file=sys.stderr)
            return ExitCode.FAILED
    return ExitCode.OK


def _create(bus: Bus, keys: Keys, arguments: Mapping[str, Any]) -> None:
    key, secret = access.create(bus, keys, wanted(arguments))
    # The secret alone, so that a script can take it.
    print(secret)
    print(f"{key.id} is made. Its secret, above, is not kept and cannot be shown again.", file=sys.stderr)


def _list(bus: Bus, keys: Keys, arguments: Mapping[str, Any]) -> None:
    del arguments
    known = sorted(
        access.parse_keys(bus.do("HGETALL", keys.api_keys())), key=lambda key: (key.created, key.id)
    )
    rows = [_HEADINGS, *map(_row, known)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _revoke(bus: Bus, keys: Keys, arguments: Mapping[str, Any]) -> None:
    key = access.revoke(bus, keys, arguments["id"])
    print(f"{key.id} is revoked.", file=sys.stderr)


_ACT = {"create": _create, "list": _list, "revoke": _revoke}


def wanted(arguments: Mapping[str, Any]) -> ApiKey:
    """The key that the options of `create` describe, without an id. Raises `SettingsError`."""
    given = {name: arguments.get(name) or "" for name in _OPTIONS}
    if not all(char.isprintable() for char in given["name"]) or len(given["name"]) > 100:
        raise SettingsError("--name must be at most 100 printable characters")
    try:
        return ApiKey(
            "",
            name=given["name"],
            tenant=given["tenant"],
            models=tuple(filter(None, given["models"].split(","))),
            requests_per_minute=_limit("--requests-per-minute", given["requests_per_minute"]),
            tokens_per_minute=_limit("--tokens-per-minute", given["tokens_per_minute"]),
            expires=_moment(given["expires_in"]),
        )
    except ValueError as error:
        raise SettingsError(str(error)) from None


def _limit(flag: str, raw: str) -> int:
    try:
        return count(1, 10**9).parse(raw) if raw else 0
    except ValueError as error:
        raise ValueError(f"{flag} {error}, not {raw!r}") from None


def _moment(raw: str) -> int:
    if not raw:
        return 0
    found = re.fullmatch(r"([1-9][0-9]{0,8})([dhms])", raw)
    if found is None:
        raise ValueError(f"--expires-in must be a time like 90d, 12h, 30m or 45s, not {raw!r}")
    moment = int(time.time()) + int(found[1]) * _UNITS[found[2]]
    if moment > access.MAX_NUMBER:
        raise ValueError(f"--expires-in must end before the year 10000, not {raw!r}")
    return moment


def _row(key: ApiKey) -> tuple[str, ...]:
    limits = [str(limit) if limit else "-" for limit in (key.requests_per_minute, key.tokens_per_minute)]
    models = ",".join(key.models) or "all"
    return (key.id, key.name or "-", key.tenant or "-", *limits, models, _date(key.created), _state(key))


def _state(key: ApiKey) -> str:
    if key.revoked:
        return f"revoked {_date(key.revoked)}"
    if not key.expires:
        return "active"
    return f"{'active until' if key.holds(time.time()) else 'expired'} {_date(key.expires)}"


def _date(moment: int) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
