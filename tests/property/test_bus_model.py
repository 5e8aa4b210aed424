"""The bus under every interleaving that hypothesis finds, on a real server.

Several tokenizers, schedulers and detokenizers take single steps in any order; they lose replies, repeat
calls, crash, drain, expire, come back as zombies and rob each other, while clients cancel and deadlines pass.
After each step: logs and texts are right as far as they go, and there is at most one end. In the end, whoever
is left finishes what there is: then every request has ended once, its text is whole, and nothing is left.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from common.bus.client import Bus
from common.bus.embedded import EmbeddedRedis
from common.bus.keys import SCHEDULERS, TOKENIZERS
from tests.helpers.bus_actors import check_ended, published
from tests.helpers.bus_moves import MOVES, Stage
from tests.helpers.bus_rollback import FragileStage
from tests.helpers.servers import BOTH


class BusMachine(RuleBasedStateMachine):
    """Draws moves until it stops; then everything must come to its end."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        for _ in range(data.draw(st.integers(1, 3))):
            MOVES["admit"].run(self.stage, data)

    # One rule for all moves: it only draws what is possible now, so that most steps do something.
    @rule(data=st.data())
    def something_happens(self, data: st.DataObject) -> None:
        note(self.stage.play(data))

    @invariant()
    def everything_is_right_as_far_as_it_goes(self) -> None:
        desk = self.stage.desk
        for uid, plan in self.stage.world.plans.items():
            out, choices = desk.out(uid), range(len(plan.lengths))
            assert len([entry for entry in out if entry.end]) <= 1
            logs = desk.bus.do("MGET", *(desk.keys.gen(uid, choice) for choice in choices))
            for choice, log in zip(choices, logs, strict=True):
                assert log is None or plan.log(choice).startswith(log.decode())
                assert plan.text(choice).startswith(published(out, choice))

    def teardown(self) -> None:
        stage = self.stage
        stage.finish()
        check_ended(stage.world, stage.may_fail)
        for stream, group in ((stage.desk.work_in, TOKENIZERS), (stage.desk.sched, SCHEDULERS)):
            consumers = {info[1].decode() for info in stage.desk.bus.do("XINFO", "CONSUMERS", stream, group)}
            assert consumers.isdisjoint(stage.dead), "the dead keep no name in a group"


class FragileBusMachine(BusMachine):
    """With a Redis that rolls back, as one without its last seconds of AOF does."""

    stage: FragileStage

    @invariant()
    def clients_see_no_gap_and_no_repeat(self) -> None:
        self.stage.watch()


SETTINGS = settings(
    max_examples=25,
    stateful_step_count=80,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.parametrize("redis_binary", BOTH, indirect=True)
def test_the_bus(redis_server: EmbeddedRedis) -> None:
    bus = Bus(redis_server.url, name="model")
    run_state_machine_as_test(lambda: BusMachine(Stage(bus)), settings=SETTINGS)
    bus.close()


def test_the_bus_on_a_redis_that_rolls_back(redis_server: EmbeddedRedis) -> None:
    bus = Bus(redis_server.url, name="model")
    run_state_machine_as_test(lambda: FragileBusMachine(FragileStage(bus)), settings=SETTINGS)
    bus.close()
