"""The whole content of a small Redis: to compare, to copy, and to put back."""

from __future__ import annotations

from typing import Any

from common.bus.client import Bus

Copy = dict[bytes, tuple[bytes, int]]


def names(bus: Bus) -> list[bytes]:
    """All keys, sorted."""
    return sorted(bus.do("KEYS", "*"))


def copy_of(bus: Bus) -> Copy:
    """Every key as RESTORE takes it: streams with their groups and pending entries, and times to live."""
    return {key: (bus.do("DUMP", key), max(0, bus.do("PTTL", key))) for key in names(bus)}


def put_back(bus: Bus, copy: Copy) -> None:
    """Makes Redis what it was when ``copy`` was made."""
    bus.do("FLUSHALL")
    for key, (data, ttl) in copy.items():
        bus.do("RESTORE", key, ttl, data)


def contents(bus: Bus) -> dict[bytes, Any]:
    """Every key with its value and whether it has a time to live. Equal contents are equal states."""
    return {key: (_value(bus, key), bus.do("PTTL", key) >= 0) for key in names(bus)}


_FINGERPRINT = """
local seen = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  local mark = redis.sha1hex(redis.call('DUMP', key))
  seen[#seen + 1] = {key, mark, redis.call('PTTL', key) >= 0 and 1 or 0}
end
return seen
"""


def fingerprint(bus: Bus) -> dict[bytes, tuple[bytes, int]]:
    """As `contents`, in one call and not for reading: equal before and after, nothing has changed."""
    return {key: (mark, lasting) for key, mark, lasting in bus.do("EVAL", _FINGERPRINT, 0)}


def timeless(value: Any) -> Any:
    """``contents`` without the names of entries and other words that only the clock decides."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [timeless(item) for item in value]
    text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
    head = text.partition("-")[0]
    return "time" if head.isdigit() and len(head) >= 13 else value


def _value(bus: Bus, key: bytes) -> Any:
    kind = bus.do("TYPE", key)
    if kind == b"hash":
        flat = bus.do("HGETALL", key)
        return dict(sorted(zip(flat[::2], flat[1::2], strict=True)))
    if kind == b"set":
        return sorted(bus.do("SMEMBERS", key))
    if kind == b"zset":
        return bus.do("ZRANGE", key, 0, -1, "WITHSCORES")
    if kind == b"string":
        return bus.do("GET", key)
    if kind == b"list":
        return bus.do("LRANGE", key, 0, -1)
    return _stream(bus, key)


def _stream(bus: Bus, key: bytes) -> Any:
    groups = {}
    for info in bus.do("XINFO", "GROUPS", key):
        group = dict(zip(info[::2], info[1::2], strict=True))
        name = group[b"name"]
        pending = [row[:2] for row in bus.do("XPENDING", key, name, "-", "+", 10_000)]
        consumers = sorted(info[1] for info in bus.do("XINFO", "CONSUMERS", key, name))
        groups[name] = (group[b"last-delivered-id"], group[b"entries-read"], pending, consumers)
    return bus.do("XRANGE", key, "-", "+"), groups
