"""`python -m tests.soak [NAME ...]`: runs the long runs, or those named, and prints a table for each.

`--scale 0.1` makes all of them shorter. The exit code is 1 when a bound is broken.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence

from tests.soak import kills, overload, rolling, short_requests, slow_readers
from tests.soak.measure import Row, bad, table

SCENARIOS: dict[str, tuple[str, Callable[[float], Sequence[Row]]]] = {
    "overload": ("Ten times the capacity", lambda scale: overload.run(max(5.0, 60 * scale))),
    "slow": (
        "Slow readers",
        lambda scale: slow_readers.run(max(10, int(100 * scale)), 60.0),
    ),
    "short": ("Short requests", lambda scale: short_requests.run(max(1000, int(20_000 * scale)))),
    "restarts": ("A rolling restart", lambda _: rolling.restarts()),
    "versions": ("Other versions side by side", lambda _: rolling.versions()),
    "kills": ("Single kills, a peer standing by", lambda scale: kills.run(max(2, int(20 * scale)))),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.soak", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SCENARIOS)}")
    parser.add_argument("--scale", type=float, default=1.0)
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - SCENARIOS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    # The tables are the output; what a fleet's supervisor has to say is in its log.
    logging.getLogger().addHandler(logging.NullHandler())
    broken = 0
    for name in chosen.names or SCENARIOS:
        title, run = SCENARIOS[name]
        rows = run(chosen.scale)
        broken += len(bad(rows))
        print(table(title, rows), flush=True)
        print(flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
