"""Every key name of the bus, in one place. A literal key anywhere else fails a test.

All keys of a request and of its queues carry the hash tag ``{p}`` of one partition, so that every script
and every XREAD touches a single slot (Redis Cluster).
"""

from __future__ import annotations

import os
import re
import time
import zlib
from dataclasses import dataclass
from urllib.parse import quote

#: Consumer group of the tokenizers on `in`, of the schedulers on `sched`, and the offset store on `tok`.
TOKENIZERS, SCHEDULERS, DETOKENIZERS = "tk", "sc", "dt"

INTERACTIVE, BATCH = "interactive", "batch"
_UID = re.compile(r"(0|[1-9][0-9]{0,3})-[0-9a-f]{32}")
#: Classes of work, most urgent first.
CLASSES = (INTERACTIVE, BATCH)


def new_uid(partition: int) -> str:
    """A fresh request id ``<partition>-<uuid7 hex>``: unique, and sorted by its time of birth (RFC 9562)."""
    millis = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10), "big")
    value = (millis & (2**48 - 1)) << 80 | random
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return f"{partition}-{value:032x}"


def moved(uid: str, partition: int) -> str:
    """The uid with the same random part on another partition."""
    return f"{partition}-{birth_of(uid)}"


def birth_of(uid: str) -> str:
    """The part of a uid that is the same on every partition."""
    return uid.partition("-")[2]


def partition_of(uid: str) -> int:
    """The partition a uid names; ValueError when it is not one of our ids."""
    found = _UID.fullmatch(uid)
    if found is None:
        raise ValueError(f"not a request id: {uid[:64]!r}")
    return int(found[1])


def partition_for(text: str, partitions: int) -> int:
    """The partition on which every use of ``text`` (tenant and Idempotency-Key) meets."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) % partitions


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names under one prefix; all that belongs to a request is on its partition."""

    prefix: str = "ms"

    def base(self, partition: int) -> str:
        return f"{self.prefix}:{{{partition}}}:"

    def req(self, uid: str) -> str:
        return f"{self._home(uid)}req:{uid}"

    def out(self, uid: str) -> str:
        return f"{self._home(uid)}out:{uid}"

    def gen(self, uid: str, choice: int) -> str:
        return f"{self._home(uid)}gen:{uid}:{choice}"

    def work_in(self, partition: int, model: str, cls: str) -> str:
        return f"{self.base(partition)}in:{_name(model)}:{cls}"

    def sched(self, partition: int, model: str, cls: str) -> str:
        return f"{self.base(partition)}sched:{_name(model)}:{cls}"

    def inflight(self, partition: int, model: str, cls: str) -> str:
        return f"{self.base(partition)}inflight:{_name(model)}:{cls}"

    def bytes(self, partition: int, model: str, cls: str) -> str:
        """Hash uid -> prompt bytes of what is in flight, and their `total`: the bound in bytes."""
        return f"{self.base(partition)}bytes:{_name(model)}:{cls}"

    def tok(self, partition: int) -> str:
        return f"{self.base(partition)}tok"

    def lease(self, partition: int, worker: str) -> str:
        return f"{self.base(partition)}lease:{worker}"

    def detok_lease(self, partition: int) -> str:
        return f"{self.base(partition)}lease:detok"

    def cancel(self, partition: int) -> str:
        return f"{self.base(partition)}cancel"

    def pause(self, partition: int) -> str:
        return f"{self.base(partition)}pause"

    def idem(self, partition: int, digest: str) -> str:
        return f"{self.base(partition)}idem:{digest}"

    def dead(self, partition: int) -> str:
        return f"{self.base(partition)}dead"

    def models(self) -> str:
        """Hash model id -> JSON of its limits, written by schedulers."""
        return f"{self.prefix}:models"

    def workers(self) -> str:
        """Set of worker ids whose `worker` key may exist: the index that spares a SCAN."""
        return f"{self.prefix}:workers"

    def worker(self, worker: str) -> str:
        return f"{self.prefix}:worker:{worker}"

    def api_keys(self) -> str:
        """Hash id -> JSON of every API key."""
        return f"{self.prefix}:keys"

    def rate(self, key: str) -> str:
        """Hash of an API key's limits and what is used of them; on a slot of its own."""
        return f"{self.prefix}:rate:{{{key}}}"

    def charge(self, key: str, uid: str) -> str:
        """String: the tokens for which a request was charged, or `settled`."""
        return f"{self.rate(key)}:{birth_of(uid)}"

    def meta(self) -> str:
        """Hash of what all processes must agree on: the number of partitions."""
        return f"{self.prefix}:meta"

    def _home(self, uid: str) -> str:
        return f"{self.prefix}:{{{uid.partition('-')[0]}}}:"


def _name(model: str) -> str:
    return quote(model, safe="")
