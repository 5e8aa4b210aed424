"""One partition's detokenizer: reads `tok` from the committed offset, makes text and a new offset of it.

The state at the first uncommitted record i of a choice is what the decoder makes of gen[0:i]; everything that
would have released is already published (B6). So whoever owns the partition can rebuild it from Redis alone.
It is `workers.detokenizer.loop` that waits for news, for all partitions of a worker together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from common.bus import handoffs
from common.bus.client import BLOCK_MS, READ_TIMEOUT_S, BlockingBus, Bus, BusDownError, NoGroupError
from common.bus.handoffs import Finished, Published, Text
from common.bus.keys import DETOKENIZERS, Keys
from common.bus.scripts import Call
from common.errors import MillstreamError
from common.logging import Log
from common.messages import TokRecord, parse_records
from workers.detokenizer.choices import Choices

log = Log(__name__)

#: Entries (engine steps) per read, so per commit.
_COUNT = 64
_RETRY_S = 0.1
_PRUNE_S = 30.0


class Partition:
    """A partition held under one epoch. For one thread.

    `ask`, `check`, `take` and `settle` raise `MillstreamError`, after which `recover` is to be called.
    """

    def __init__(
        self, bus: Bus, keys: Keys, number: int, epoch: int, choices: Choices, *, name: str, ttl_ms: int
    ) -> None:
        self._bus = bus
        self._keys = keys
        self.number = number
        self._epoch = epoch
        self._choices = choices
        self._ttl_ms = ttl_ms
        #: The committed offset, as far as is known, and the one that the commit under way leads to.
        self._offset = ""
        self._next = ""
        self._reader = BlockingBus(bus.url, name=f"{name}-tok-{number}")
        #: Since when a read has been waiting for news; None while there is none.
        self._asked_at: float | None = None
        self._again_at = 0.0
        self._next_prune = time.monotonic() + _PRUNE_S
        #: Records seen so far.
        self.records = 0

    def fileno(self) -> int:
        """What to wait on: readable once the answer to `ask` has come."""
        return self._reader.fileno()

    @property
    def waiting(self) -> bool:
        """Whether a read is on its way."""
        return self._asked_at is not None

    def ask(self) -> None:
        """Sends a read for what follows the committed offset, unless one is on its way or it is too soon."""
        now = time.monotonic()
        if self._asked_at is not None or now < self._again_at:
            return
        if now >= self._next_prune:
            self._next_prune = now + _PRUNE_S
            self._choices.prune(int(time.time() * 1000))
        if not self._offset:
            self._offset = self._committed()
        tok = self._keys.tok(self.number)
        self._reader.ask("XREAD", "COUNT", _COUNT, "BLOCK", BLOCK_MS // 2, "STREAMS", tok, self._offset)
        self._asked_at = now

    def check(self) -> None:
        """Whether a read that has not been answered yet is still waited for."""
        if self._asked_at is not None and time.monotonic() - self._asked_at > READ_TIMEOUT_S:
            raise BusDownError("Redis did not answer a read.")

    def take(self) -> Call[Published] | None:
        """The commit of what the read brought; None when that was nothing."""
        self._asked_at = None
        reply = self._reader.answer()
        if not reply:
            if self._committed() != self._offset:  # a Redis that came back empty or older
                self._forget()
            return None
        entries = reply[0][1]
        records = [record for entry in entries for record in self._records(*entry)]
        self._choices.prepare(records)
        texts: list[Text] = []
        finished: list[Finished] = []
        for record in records:
            made = self._choices.push(record)
            if isinstance(made, Text):
                texts.append(made)
            elif made is not None:
                finished.append(made)
        self._next = entries[-1][0].decode()
        return self._commit(len(entries), texts, finished)

    def settle(self, outcome: Published | MillstreamError) -> None:
        """Takes the answer to a commit; one that was repeated finds that it was made."""
        if isinstance(outcome, MillstreamError):
            raise outcome
        if outcome.offset == self._next:
            self._offset = self._next
            return
        log.warning("the offset moved under us", partition=self.number, stored=outcome.offset)
        self._forget()

    def recover(self, error: MillstreamError) -> None:
        """Begins anew after an error: what is known of the offset and the decoders may be wrong now.

        Whether a commit without an answer was made shows in the offset that is stored.
        """
        self._forget()
        self._asked_at = None
        self._reader.close()
        self._again_at = time.monotonic() + _RETRY_S
        if isinstance(error, NoGroupError):
            self._create_group()
        else:
            log.warning("a pass failed, trying again", partition=self.number, error=error.message)

    def close(self) -> None:
        """Lets go of it; what was read and not committed is the next owner's."""
        self._reader.close()

    def _forget(self) -> None:
        self._offset = ""
        self._choices.clear()

    def _create_group(self) -> None:
        """The stream is gone (flushed): starts it again, from its beginning."""
        try:
            self._bus.do("XGROUP", "CREATE", self._keys.tok(self.number), DETOKENIZERS, "0", "MKSTREAM")
        except MillstreamError as error:
            if "BUSYGROUP" not in error.message:
                log.warning("the offset store could not be created", error=error.message)

    def _records(self, entry_id: bytes, fields: list[bytes]) -> list[TokRecord]:
        """The records of an entry; none of one that nobody of ours wrote: it must not hold up the others."""
        try:
            rows = parse_records(fields[fields.index(b"r") + 1].decode())
        except (ValueError, IndexError) as error:
            log.warning(
                "an entry cannot be read", partition=self.number, entry=entry_id.decode(), error=error
            )
            return []
        self.records += len(rows)
        return rows

    def _commit(self, entries: int, texts: Sequence[Text], finished: Sequence[Finished]) -> Call[Published]:
        return handoffs.pub(
            self._keys,
            self.number,
            epoch=self._epoch,
            expected=self._offset,
            offset=self._next,
            entries=entries,
            ttl_ms=self._ttl_ms,
            texts=texts,
            finished=finished,
            group=DETOKENIZERS,
        )

    def _committed(self) -> str:
        """The stored offset, as XINFO shows it. Raises `NoGroupError` when there is none."""
        for info in self._bus.do("XINFO", "GROUPS", self._keys.tok(self.number)):
            named: dict[bytes, Any] = dict(zip(info[::2], info[1::2], strict=True))
            if named[b"name"] == DETOKENIZERS.encode():
                return str(named[b"last-delivered-id"].decode())
        raise NoGroupError("no offset store")
