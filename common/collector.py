"""Python's garbage collector, set for processes that make many short-lived objects and few cycles."""

from __future__ import annotations

import gc

#: Python's own thresholds spend a tenth of the time on looking for cycles that are not there.
_THRESHOLDS = (20_000, 20, 50)


def settle() -> None:
    """To be called once start-up is over: what exists by now lives as long as the process, and is let be."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
