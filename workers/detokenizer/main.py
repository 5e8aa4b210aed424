"""The detokenizer as a process: settings in, exit code out. Never loads torch."""

from __future__ import annotations

from collections.abc import Callable

from common.settings import Settings
from workers import process
from workers.checkpoint import locate
from workers.detokenizer.choices import Choices
from workers.detokenizer.worker import DetokenizerWorker
from workers.process import Process


def run(settings: Settings) -> int:
    """Runs a detokenizer until it is told to stop; returns the exit code."""
    return process.main(settings, "detokenizer", _start)


def _start(proc: Process) -> int:
    settings = proc.settings
    checkpoint = locate(settings.model, weights=False)

    def load() -> Callable[[int], Choices]:
        from workers.text.codec import TokenCodec
        from workers.text.stream import TextStreams

        streams = TextStreams(TokenCodec.load(checkpoint))
        return lambda _partition: Choices(proc.bus, proc.keys, streams)

    worker = DetokenizerWorker(
        proc.bus,
        proc.keys,
        proc.lease,
        load,
        partitions=settings.partitions,
        ttl_ms=proc.reply_ttl_ms,
        progress=proc.progress,
    )
    return proc.run(worker, worker.stats)
