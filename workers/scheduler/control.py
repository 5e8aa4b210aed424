"""What Redis last said to a scheduler: whom to cancel, whom to pause, whose rows it refused (B9)."""

from __future__ import annotations

from collections.abc import Mapping

from common.bus.handoffs import Emitted
from workers.scheduler.jobs import Job

#: A partition is paused while more steps than this await its detokenizer.
BACKLOG = 200


class Control:
    """The last reply of every partition."""

    def __init__(self) -> None:
        self._replies: dict[int, Emitted] = {}
        self._refused: list[str] = []

    def note(self, partition: int, reply: Emitted) -> None:
        """An EMIT, or a tick, was answered."""
        self._replies[partition] = reply
        self._refused += [f"{uid}/{choice}" for uid, choice in reply.refused]

    def refused(self) -> list[str]:
        """Choices that are not this worker's any more, each said once."""
        refused, self._refused = self._refused, []
        return refused

    def cancelled(self, jobs: Mapping[str, Job]) -> list[str]:
        """Choices to cancel; the sets also name others' requests."""
        flags = frozenset().union(*(reply.cancel for reply in self._replies.values()))
        return [key for key, job in jobs.items() if key in flags or job.uid in flags] if flags else []

    def paused(self, jobs: Mapping[str, Job]) -> set[str]:
        """Choices to pause: flagged, or of a partition whose detokenizer is behind (and of no other)."""
        flags = frozenset().union(*(reply.pause for reply in self._replies.values()))
        behind = {partition for partition, reply in self._replies.items() if reply.backlog > BACKLOG}
        if not flags and not behind:
            return set()
        return {key for key, job in jobs.items() if job.uid in flags or job.partition in behind}
