"""ATTACH's typed face: what is being read is kept, and is not given up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.bus.keys import Keys, partition_of
from common.bus.scripts import Call


@dataclass(frozen=True, slots=True)
class Hold:
    """One request that is being read. ``hold_ms`` None keeps only its keys; 0: its reader has left."""

    uid: str
    choices: int
    hold_ms: int | None = None
    #: Digest of its Idempotency-Key, if it has one.
    idem: str = ""


def attach(keys: Keys, holds: Sequence[Hold], ttl_ms: int) -> Call[int]:
    """ATTACH, by the API that reads: the requests of one partition; how many of them there still are."""
    names: list[str] = []
    args: list[str | int | bytes] = [ttl_ms]
    for hold in holds:
        own = [keys.req(hold.uid), keys.out(hold.uid)]
        own += [keys.gen(hold.uid, choice) for choice in range(hold.choices)]
        if hold.idem:
            own.append(keys.idem(partition_of(hold.uid), hold.idem))
        names += own
        args += ("" if hold.hold_ms is None else hold.hold_ms, len(own))
    return Call("attach", names, args, int)
