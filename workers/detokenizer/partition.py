"""One partition's detokenizer: reads `tok` from the committed offset, commits text and offset with PUB.

The state at the first uncommitted record i of a choice is what the decoder makes of gen[0:i]; everything that
would have released is already published (B6). So whoever owns the partition can rebuild it from Redis alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from common.bus import handoffs
from common.bus.client import BLOCK_MS, BlockingBus, Bus, FencedError, NoGroupError
from common.bus.handoffs import Finished, Text
from common.bus.keys import DETOKENIZERS, Keys
from common.bus.leases import Progress
from common.errors import MillstreamError
from common.logging import Log
from common.messages import TokRecord, parse_records
from workers.detokenizer.choices import Choices

log = Log(__name__)

#: Entries (engine steps) per read, so per commit.
_COUNT = 64
_RETRY_S = 0.1
_PRUNE_S = 30.0


class PartitionLoop:
    """Owns one partition under one epoch, in a thread of its own, until told to stop or fenced."""

    def __init__(
        self,
        bus: Bus,
        keys: Keys,
        partition: int,
        epoch: int,
        choices: Choices,
        *,
        name: str,
        ttl_ms: int,
        progress: Progress,
        on_fenced: Callable[[FencedError], None],
    ) -> None:
        self._bus = bus
        self._keys = keys
        self.partition = partition
        self._epoch = epoch
        self._choices = choices
        self._ttl_ms = ttl_ms
        self._progress = progress
        self._on_fenced = on_fenced
        self._offset = ""
        self._next_prune = time.monotonic() + _PRUNE_S
        self._stop = threading.Event()
        self._name = f"partition-{partition}"
        self._blocking = BlockingBus(bus.url, name=f"{name}-tok-{partition}")
        self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
        self.records = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Asks the loop to end after its commit."""
        self._stop.set()

    def join(self, timeout_s: float) -> bool:
        """Whether the loop has ended within the time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        try:
            while not self._stop.is_set():
                self._progress.beat(self._name)
                try:
                    self._pass()
                except NoGroupError:
                    self._create_group()
                except FencedError as error:
                    self._on_fenced(error)
                    return
                except MillstreamError as error:
                    log.warning("a pass failed, trying again", partition=self.partition, error=error.message)
                    self._forget()
                    time.sleep(_RETRY_S)
        finally:
            self._progress.end(self._name)
            self._blocking.close()

    def _forget(self) -> None:
        """What is known of the offset and the decoders may be wrong now: read it from Redis again."""
        self._offset = ""
        self._choices.clear()

    def _create_group(self) -> None:
        """The stream is gone (flushed): start it again, from its beginning."""
        self._forget()
        try:
            self._bus.do("XGROUP", "CREATE", self._keys.tok(self.partition), DETOKENIZERS, "0", "MKSTREAM")
        except MillstreamError as error:
            if "BUSYGROUP" not in error.message:
                log.warning("the offset store could not be created", error=error.message)
                time.sleep(_RETRY_S)

    def _pass(self) -> None:
        """Reads what is new, decodes it, commits it."""
        if time.monotonic() >= self._next_prune:
            self._next_prune = time.monotonic() + _PRUNE_S
            self._choices.prune(int(time.time() * 1000))
        tok = self._keys.tok(self.partition)
        if not self._offset:
            self._offset = self._committed()
        reply = self._blocking.do(
            "XREAD", "COUNT", _COUNT, "BLOCK", BLOCK_MS // 2, "STREAMS", tok, self._offset
        )
        if not reply:
            self._check_offset()
            return
        entries = reply[0][1]
        texts: list[Text] = []
        finished: list[Finished] = []
        records = [record for entry in entries for record in self._records(*entry)]
        self._choices.prepare(records)
        for record in records:
            self._decode(record, texts, finished)
        self._commit(entries[-1][0].decode(), len(entries), texts, finished)

    def _records(self, entry_id: bytes, fields: list[bytes]) -> list[TokRecord]:
        """The records of an entry; none of one that nobody of ours wrote: it must not hold up the others."""
        try:
            rows = parse_records(fields[fields.index(b"r") + 1].decode())
        except (ValueError, IndexError) as error:
            log.warning(
                "an entry cannot be read", partition=self.partition, entry=entry_id.decode(), error=error
            )
            return []
        self.records += len(rows)
        return rows

    def _decode(self, record: TokRecord, texts: list[Text], finished: list[Finished]) -> None:
        made = self._choices.push(record)
        if isinstance(made, Text):
            texts.append(made)
        elif made is not None:
            finished.append(made)

    def _commit(self, offset: str, entries: int, texts: list[Text], finished: list[Finished]) -> None:
        """PUB until it is answered: the outcome of a lost reply shows in the offset that is stored."""
        call = handoffs.pub(
            self._keys,
            self.partition,
            epoch=self._epoch,
            expected=self._offset,
            offset=offset,
            entries=entries,
            ttl_ms=self._ttl_ms,
            texts=texts,
            finished=finished,
            group=DETOKENIZERS,
        )
        reply = self._bus.run(call)
        if reply.offset != offset:
            log.warning("the offset moved under us", partition=self.partition, stored=reply.offset)
            self._forget()
            return
        self._offset = offset

    def _committed(self) -> str:
        """The stored offset, as XINFO shows it. Raises `NoGroupError` when there is none."""
        for info in self._bus.do("XINFO", "GROUPS", self._keys.tok(self.partition)):
            named: dict[bytes, Any] = dict(zip(info[::2], info[1::2], strict=True))
            if named[b"name"] == DETOKENIZERS.encode():
                return str(named[b"last-delivered-id"].decode())
        raise NoGroupError("no offset store")

    def _check_offset(self) -> None:
        """While idle: a Redis that came back empty or older has another offset than ours."""
        if self._committed() != self._offset:
            self._forget()
