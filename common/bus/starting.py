"""The typed face of START: how a scheduler takes a choice, and what it is told of it.

As in `common.bus.handoffs`, a function returns a `Call`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common import messages
from common.bus.keys import Keys, partition_of
from common.bus.scripts import Call

#: What a scheduler reads of a request: the rest may be long, and START is answered once per choice.
_START_FIELDS = (
    *("kind", "model", "params", "n", "class", "tenant", "salt", "priority", "api", "deadline", "choices"),
)


@dataclass(frozen=True, slots=True)
class Started:
    """Answer of START. ``request`` is None unless the choice is to run (OK).

    ``attempts`` above 0 make it a suspect: it is held back until it can be started to run alone.
    """

    code: str
    attempts: int
    #: The prompt of this choice; ``request`` comes without any.
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    #: Length of the token log as text; where the next piece goes (`EmitRow.at`).
    log_size: int
    request: messages.Request | None
    #: With OWNER: who ran it last; to be asked again with that.
    owner: str = ""


def start(
    keys: Keys,
    uid: str,
    choice: int,
    *,
    model: str,
    cls: str,
    worker: str,
    owner: str = "",
    alone: bool = False,
) -> Call[Started]:
    """START, by the scheduler: takes one choice. ``owner`` ran it last; ``alone``: nothing runs beside it.

    Whoever does not know the last owner is told (OWNER) and asks again.
    """
    p = partition_of(uid)
    names = (
        keys.lease(p, worker),
        keys.req(uid),
        keys.gen(uid, choice),
        keys.inflight(p, model, cls),
        keys.cancel(p),
        keys.lease(p, owner or "-"),
    )

    def parse(reply: Any) -> Started:
        code = reply[0].decode()
        if code in ("ENDED", "OWNER"):
            return Started(code, 0, (), (), 0, None, reply[1].decode() if code == "OWNER" else "")
        log = reply[1] if code == "CANCELLED" else reply[2]
        output_ids = tuple(messages.parse_ids(log))
        if code == "CANCELLED":
            return Started(code, 0, (), output_ids, len(log), None)
        values = zip(_START_FIELDS, reply[4:], strict=True)
        fields = {name.encode(): value for name, value in values if value is not None}
        request = messages.Request.from_fields(uid, fields)
        prompt_ids = tuple(messages.parse_ids(reply[3]))
        return Started(code, int(reply[1]), prompt_ids, output_ids, len(log), request)

    return Call("start", names, (uid, choice, worker, owner, int(alone), *_START_FIELDS), parse)
