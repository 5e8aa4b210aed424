"""`python -m tests.chaos --requests 2000 --faults 200 --server all --seed 1`: runs, and prints the table.

With `--sweep` every failpoint of every role is met once, instead of random faults.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from common.settings import Command
from tests.chaos import bundled
from tests.chaos.fleet import SERVERS, WORKERS, Shape
from tests.chaos.harness import Config, run
from tests.chaos.redis_faults import FAULTS
from tests.chaos.redis_runs import Played, play_all
from tests.chaos.redis_runs import table as table_of_faults
from tests.chaos.report import Report, table
from tests.chaos.sweep import CALLS, all_points, sweep
from tests.helpers.stack import REDIS_ROLE


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--server", choices=[*SERVERS, "all"], default="all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--lease-ms", type=int, default=1000)
    parser.add_argument("--api", action="store_true", help="API processes meet faults as well")
    parser.add_argument("--redis", action="store_true", help="the server is killed and restarted as well")
    parser.add_argument("--log", type=Path, help="where the processes' log goes")
    parser.add_argument("--sweep", action="store_true", help="every failpoint once")
    parser.add_argument(
        "--engine", choices=["null", "native"], default="null", help="native: the bundled model, in float32"
    )
    parser.add_argument("--redis-faults", nargs="*", metavar="NAME", help="these faults of Redis, or all")
    chosen = parser.parse_args()
    # The table is the output: what the supervisor of the fleet has to say goes with the processes' log.
    logging.getLogger().addHandler(logging.NullHandler())
    servers = SERVERS if chosen.server == "all" else [chosen.server]
    if chosen.redis_faults is not None:
        return _redis_faults(chosen, servers)
    reports: list[Report] = []
    for server in servers:
        report = _sweep(chosen, server) if chosen.sweep else _run(chosen, server)
        reports.append(report)
        print(f"{server}: {'good' if report.good else 'BAD'}\n{report.problems()}", flush=True)
        if chosen.log:
            print(report.worst())
            chosen.log.with_suffix(f".{server}.log").write_text(report.logs)
    print(table(reports))
    return 0 if all(report.good for report in reports) else 1


def _run(chosen: argparse.Namespace, server: str) -> Report:
    if chosen.engine == "native":
        return bundled.run(chosen.requests, chosen.faults, server=server, seed=chosen.seed)
    roles = [*WORKERS, *[Command.API] * chosen.api, *[REDIS_ROLE] * chosen.redis]
    return run(
        Config(
            requests=chosen.requests,
            faults=chosen.faults,
            server=server,
            seed=chosen.seed,
            streams=chosen.streams,
            roles=roles,
            shape=Shape(lease_ms=chosen.lease_ms, step_ms=chosen.step_ms),
        )
    )


def _sweep(chosen: argparse.Namespace, server: str) -> Report:
    swept = sweep({role: all_points(role) for role in CALLS}, server=server, seed=chosen.seed)
    print(f"failpoints met: {len(swept.reached)}; not met in time: {', '.join(swept.missed) or 'none'}")
    return swept.report


def _redis_faults(chosen: argparse.Namespace, servers: Sequence[str]) -> int:
    played: list[Played] = []
    for server in servers:
        for one in play_all(chosen.redis_faults or list(FAULTS), server, chosen.lease_ms):
            played.append(one)
            problems = one.problems()
            print(f"{server}, {one.name}: {'BAD' if problems else 'good'}\n{problems}", flush=True)
            if chosen.log:
                chosen.log.with_suffix(f".{server}.{len(played)}.log").write_text(one.logs)
    print(table_of_faults(played))
    return 1 if any(one.problems() for one in played) else 0


if __name__ == "__main__":
    sys.exit(main())
