"""What every worker process sets up the same way: its bus, its keys, its lease, its runner."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from common import logging
from common.bus.client import Bus
from common.bus.keys import Keys
from common.bus.leases import Lease, Progress
from common.bus.server import UnfitServerError, wait_for_server
from common.errors import MillstreamError
from common.exitcodes import ExitCode
from common.logging import Log
from common.settings import Settings
from workers.checkpoint.errors import CheckpointError
from workers.runner import Runner, Worker

log = Log(__name__)

_REDIS_WAIT_S = 30.0


class Process:
    """The common parts of one worker process, and its run."""

    def __init__(self, settings: Settings, role: str) -> None:
        self.settings = settings
        self.role = role
        self.worker_id = settings.worker_id
        self.keys = Keys(settings.key_prefix)
        self.bus = Bus(settings.redis_url, name=self.worker_id)
        self.progress = Progress()
        self._stats: Callable[[], Mapping[str, Any]] = dict
        self.lease = Lease(
            settings.redis_url,
            self.keys,
            worker=self.worker_id,
            role=role,
            model=settings.served_model_name,
            partitions=settings.partitions,
            ttl_ms=settings.lease_ms,
            progress=self.progress,
            stats=self._read_stats,
        )

    def _read_stats(self) -> Mapping[str, Any]:
        """The worker's readings; the lease exists before the worker does."""
        return self._stats()

    @property
    def reply_ttl_ms(self) -> int:
        """How long a finished reply stays readable."""
        return int(self.settings.reply_ttl * 1000)

    def run(self, worker: Worker, stats: Callable[[], Mapping[str, Any]]) -> int:
        """Runs the worker to its end; returns the exit code."""
        self._stats = stats
        runner = Runner(worker, self.lease, self.progress, grace_s=self.settings.shutdown_grace)
        try:
            return runner.run()
        finally:
            self.bus.close()


def exit_with_any_thread() -> None:
    """From now on the process ends when one of its threads does so by a fault of ours.

    Without that thread it would look alive, keep its leases and leave a part of its work undone for ever.
    """

    def end(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            log.exception("a thread died, and the worker with it")
            os._exit(ExitCode.FAILED)

    threading.excepthook = end


def main(settings: Settings, role: str, start: Callable[[Process], int]) -> int:
    """The frame of a role's `run`: logging, a Redis that fits, and errors as one line and an exit code."""
    logging.setup(settings.log_level, settings.log_format, role, settings.worker_id)
    exit_with_any_thread()
    try:
        keys = Keys(settings.key_prefix)
        agreed = wait_for_server(settings.redis_url, keys, settings.partitions, timeout_s=_REDIS_WAIT_S)
        return start(Process(replace(settings, partitions=agreed), role))
    except (CheckpointError, UnfitServerError) as error:
        # Trying again cannot help: a supervisor ends with this line instead of starting us for ever.
        log.error("cannot run with these settings", reason=error.message)
        return ExitCode.USAGE
    except MillstreamError as error:
        log.error("cannot run", reason=error.message)
        return ExitCode.FAILED
