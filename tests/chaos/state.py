"""What Redis says about the requests of a chaos run: whose they are, and what is left of them at the end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import redis

from common.bus.keys import CLASSES, SCHEDULERS, TOKENIZERS, Keys
from common.messages import Kind, parse_ids, parse_out
from common.settings import Command
from tests.chaos.plans import Plan
from tests.helpers.inside import Inside
from tests.helpers.text import BUNDLED
from workers.engine.null import token_at

#: A method of `Keys` that names a queue.
Make = Callable[[int, str, str], str]


class State:
    """Reads one server. ``client`` gives text."""

    def __init__(self, client: redis.Redis, keys: Keys, partitions: int) -> None:
        self.redis = client
        self.keys = keys
        self.partitions = range(partitions)
        self.inside = Inside(client, keys=keys, partitions=partitions)

    def victims(self, role: str, worker: str) -> set[str]:
        """Uids of the requests in the hands of ``worker``."""
        if role == Command.TOKENIZER:
            return self._pending(self.keys.work_in, TOKENIZERS, worker)
        if role == Command.SCHEDULER:
            return self._pending(self.keys.sched, SCHEDULERS, worker)
        in_flight = self.inside.in_flight()
        if role == Command.DETOKENIZER:
            leases = {p: self.redis.hget(self.keys.detok_lease(p), "owner") for p in self.partitions}
            return {uid for uid in in_flight if leases[int(uid.partition("-")[0])] == worker}
        if role == Command.API:
            return {uid for uid in in_flight if self.inside.field(uid, "api") == worker}
        return set(in_flight)

    def served_by_none_of(self, workers: set[str]) -> set[str]:
        """Uids of the requests on partitions that none of these detokenizers owns."""
        owners = {p: self.redis.hget(self.keys.detok_lease(p), "owner") for p in self.partitions}
        down = {partition for partition, owner in owners.items() if owner not in workers}
        return {uid for uid in self.inside.in_flight() if int(uid.partition("-")[0]) in down}

    def lapse(self, worker: str) -> tuple[float, bool]:
        """Seconds since the first of the worker's leases expired, on the server's clock; if it is dead."""
        worst, fenced = float("-inf"), False
        for partition in self.partitions:
            dead, expiry = self.redis.hmget(self.keys.lease(partition, worker), "dead", "expiry")
            seconds, micros = self.redis.time()
            worst = max(worst, seconds + micros / 1e6 - int(expiry or 0) / 1000)
            fenced |= dead == "1"
        return worst, fenced

    def _queues(self, make: Make) -> Iterator[str]:
        for partition, cls in itertools.product(self.partitions, CLASSES):
            yield make(partition, BUNDLED, cls)

    def _pending(self, make: Make, group: str, worker: str) -> set[str]:
        uids: set[str] = set()
        for stream in self._queues(make):
            if self.redis.exists(stream):
                rows = self.redis.xpending_range(stream, group, "-", "+", 1000, consumername=worker)
                held = {row["message_id"] for row in rows}
                uids |= {fields["uid"] for entry, fields in self.redis.xrange(stream) if entry in held}
        return uids

    def make_look_overdue(self) -> None:
        """Requests in flight seem to be past their time to whoever sweeps them next, and are looked at."""
        for key in self._queues(self.keys.inflight):
            for uid in self.redis.zrange(key, 0, 0):
                self.redis.zadd(key, {uid: 1}, xx=True)

    def leftovers(self) -> dict[str, object]:
        """What should be gone when no request is in flight; empty when all is well."""
        left = dict(self.inside.held())
        for make, group in ((self.keys.work_in, TOKENIZERS), (self.keys.sched, SCHEDULERS)):
            for stream in self._queues(make):
                if self.redis.exists(stream) and (count := self.redis.xpending(stream, group)["pending"]):
                    left[f"pending in {stream}"] = count
        for partition in self.partitions:
            if count := self.redis.xlen(self.keys.tok(partition)):
                left[self.keys.tok(partition)] = count
        return left

    def attempts(self, uids: Iterable[str]) -> int:
        """How many crashes of workers were counted against requests."""
        fields = itertools.chain.from_iterable(self.redis.hgetall(self.keys.req(uid)).items() for uid in uids)
        return sum(int(value) for name, value in fields if name.startswith(("attempts:", "tok_attempts")))

    def completed(self) -> set[str]:
        """Uids of all generations that were served to their end."""
        keys = list(self.redis.scan_iter(f"{self.keys.prefix}:*:req:*", count=1000))
        found = {key.rpartition(":")[2]: self.redis.hmget(key, "terminal", "kind") for key in keys}
        return {
            uid for uid, fields in found.items() if fields in (["done", Kind.CHAT], ["done", Kind.COMPLETION])
        }

    def immortal(self) -> list[str]:
        """Keys of single requests that would stay for ever."""
        patterns = [f"{self.keys.prefix}:*:{kind}:*" for kind in ("req", "out", "gen")]
        keys = itertools.chain.from_iterable(self.redis.scan_iter(each, count=1000) for each in patterns)
        return [key for key in keys if self.redis.pttl(key) == -1]

    def faults_of(self, uid: str, plan: Plan) -> list[str]:
        """What is wrong with the token logs and the reply stream of a request that ended well."""
        faults = []
        entries = [
            parse_out(entry.encode(), [word.encode() for pair in fields.items() for word in pair])
            for entry, fields in self.redis.xrange(self.keys.out(uid))
        ]
        if [entry.end for entry in entries if entry.end] != ["done"] or not entries[-1].end:
            faults.append("the reply stream has not one end")
        if [entry.accepted >= 0 for entry in entries] != [True] + [False] * (len(entries) - 1):
            faults.append("the reply stream has not one beginning")
        for choice, text in enumerate(plan.expected.texts):
            own = [entry for entry in entries if entry.choice == choice]
            sizes = itertools.accumulate((len(entry.text) for entry in own), initial=0)
            if [entry.at for entry in own] != list(sizes)[:-1] or "".join(e.text for e in own) != text:
                faults.append(f"the reply stream of choice {choice} is not its text")
            faults += self._log_faults(uid, plan, choice)
        return faults

    def log(self, uid: str, choice: int) -> tuple[int, ...]:
        """The token log of a choice."""
        return tuple(parse_ids((self.redis.get(self.keys.gen(uid, choice)) or "").encode()))

    def _log_faults(self, uid: str, plan: Plan, choice: int) -> list[str]:
        log, least = self.log(uid, choice), plan.expected.tokens[choice]
        if plan.expected.logs:
            right = plan.expected.logs[choice]
        else:
            right = tuple(token_at(plan.choice_seed(choice), index) for index in range(len(log)))
        if log != right or not least <= len(log) <= plan.max_tokens:
            return [f"the token log of choice {choice} is wrong ({len(log)} tokens, {least} sent)"]
        return []
