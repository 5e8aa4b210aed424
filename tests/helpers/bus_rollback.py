"""A stage whose Redis now and then loses its last moments, while everybody remembers them.

What must still hold is what a client sees: nothing that it was given is retracted, repeated or skipped.
"""

from __future__ import annotations

import time

from hypothesis import strategies as st

from common.bus import leases
from common.bus.client import Bus, FencedError
from tests.helpers.bus_actors import Detokenizer, Scheduler, Tokenizer
from tests.helpers.bus_moves import Data, Stage
from tests.helpers.redis_state import copy_of, put_back


class FragileStage(Stage):
    """Rolls Redis back to a copy that it made some moves ago."""

    # These say of something that it changes nothing, or is refused, because of what Redis remembers.
    without = frozenset({
        "admit_again", "scheduler_repeats_a_step", "scheduler_skips_a_number", "scheduler_asks_again",
        "a_commit_is_repeated", "a_zombie_detokenizer_commits", "the_living_are_not_robbed",
    })  # fmt: skip
    strict = False

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus)
        self._copy = copy_of(bus)
        #: What the client of each choice has put together.
        self.seen: dict[tuple[str, int], str] = {}

    def play(self, data: Data) -> str:
        chance = data.draw(st.integers(0, 999)) * 617 % 1000
        if chance < 60:
            self._copy = copy_of(self.desk.bus)
            return "a copy is made"
        if chance < 100:
            self._roll_back()
            return "Redis rolls back"
        if chance < 200:
            self._look_for_lost_requests()
            return "the API looks for lost requests"
        try:
            return super().play(data)
        except FencedError:
            self._replace_the_fenced()
            return "somebody was fenced"

    def _roll_back(self) -> None:
        put_back(self.desk.bus, self._copy)
        time.sleep(0.002)  # names of entries are milliseconds, and a server's clock goes on
        self._bury_again()

    def _bury_again(self) -> None:
        """What supervisors and expired leases say of the dead, they say again."""
        for name in self.dead:
            self.desk.bus.run(leases.retire(self.desk.keys, 0, name, drained=False))

    def _look_for_lost_requests(self) -> None:
        for uid, request in self.world.requests.items():
            if not self.desk.bus.do("EXISTS", self.desk.keys.req(uid)):
                assert self.desk.admit(request).code == "OK"

    def _replace_the_fenced(self) -> None:
        """Who has no lease any more exits, and comes back under another name."""
        for workers, make in ((self.tokenizers, Tokenizer), (self.schedulers, Scheduler)):
            for index, worker in enumerate(workers):
                if self._is_fenced(worker.name):
                    self.bury(worker.name, drained=False)
                    workers[index] = make(self.world, self._name(make.__name__.lower()))
        for index, detokenizer in enumerate(self.detokenizers):
            if self._is_fenced(detokenizer.name) or detokenizer is not self.owner:
                self.bury(detokenizer.name, drained=False)
                self.detokenizers[index] = Detokenizer(self.world, self._name("detokenizer"))
        self.ghosts = [ghost for ghost in self.ghosts if not self._is_fenced(ghost.name)]

    def _is_fenced(self, name: str) -> bool:
        dead, seq = self.desk.bus.do("HMGET", self.desk.keys.lease(0, name), "dead", "seq")
        return dead == b"1" or seq is None

    def watch(self) -> None:
        """What the clients see now: only ever more, and right as far as it goes (B6)."""
        for uid, plan in self.world.plans.items():
            for entry in self.desk.out(uid):
                if entry.choice >= 0:
                    seen = self.seen.get((uid, entry.choice), "")
                    assert entry.at <= len(seen), "a gap in the text"
                    seen += entry.text[len(seen) - entry.at :]
                    assert plan.text(entry.choice).startswith(seen)
                    self.seen[uid, entry.choice] = seen

    def finish(self) -> None:
        self._look_for_lost_requests()
        self._bury_again()
        super().finish()
        self.watch()
