"""Waiting for something to become true, with a bound and a message."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], what: str, timeout: float = 10.0, every: float = 0.05) -> T:
    """The first true value of ``condition``; fails the test when there is none within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        if value := condition():
            return value
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(every)
