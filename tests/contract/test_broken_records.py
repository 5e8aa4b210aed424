"""Entries of `tok` that cannot be read hold up nobody; a fault ends a worker, not one thread of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from common.bus.keys import DETOKENIZERS
from common.bus.leases import Progress
from common.exitcodes import ExitCode
from tests.helpers.bus import TTL_MS, Desk
from tests.helpers.text import bundled_codec
from tests.helpers.waiting import until
from workers.detokenizer.choices import Choices
from workers.detokenizer.loop import Loop
from workers.detokenizer.partition import Partition
from workers.text.stream import TextStreams

THREAD_DIES = """
import threading, time
from common import logging
from workers.process import exit_with_any_thread
logging.setup("info", "text", "detokenizer", "detokenizer-1")
exit_with_any_thread()
threading.Thread(target=lambda: 1 / 0).start()
time.sleep(60)
"""


@pytest.mark.parametrize("fields", [("r", "garbage"), ("r", "0-u 0 first 5"), ("r", b"\xff"), ("x", "y")])
def test_records_that_cannot_be_read_are_passed_over(desk: Desk, fields: tuple[str | bytes, ...]) -> None:
    desk.open_tok()
    epoch = desk.take_partition()
    desk.bus.do("XADD", desk.tok, "*", *fields)
    request, [job] = desk.running()
    desk.generate(job, 3, "length")
    choices = Choices(desk.bus, desk.keys, TextStreams(bundled_codec()))
    loop = Loop(desk.bus, progress=Progress(), on_fenced=lambda _: None)
    loop.add(Partition(desk.bus, desk.keys, 0, epoch, choices, name="me", ttl_ms=TTL_MS))
    loop.start()
    try:
        until(lambda: desk.out(request.uid)[-1].end == "done", "the reply has ended")
    finally:
        loop.leave(0)
        until(lambda: not loop.holds(0), "the partition is let go of")
        loop.stop(10)
    assert desk.bus.do("XINFO", "GROUPS", desk.tok)[0][1] == DETOKENIZERS.encode()


def test_a_worker_does_not_outlive_one_of_its_threads() -> None:
    ended = subprocess.run([sys.executable, "-c", THREAD_DIES], capture_output=True, timeout=50, check=False)
    assert ended.returncode == ExitCode.FAILED
    assert b"ZeroDivisionError" in ended.stderr + ended.stdout
