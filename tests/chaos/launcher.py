"""Starts a role of the product with a fault in it, or as another version of itself.

The product has no such switches.
`python -m tests.chaos.launcher [--failpoint SPEC --marker FILE] [--mutant NAME] [--poison SEED]...
[--hang SEED:SECONDS:WEDGED_S --marker FILE] [--version NAME] -- ROLE FLAGS...`
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cli.main import main as run
from tests.chaos import engines, failpoints, mutants, versions


def main(arguments: Sequence[str]) -> int:
    own, role = list(arguments), []
    if "--" in own:
        at = own.index("--")
        own, role = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(prog="tests.chaos.launcher")
    parser.add_argument("--failpoint", type=failpoints.Failpoint.parse)
    parser.add_argument("--marker")
    parser.add_argument("--mutant", choices=sorted(mutants.MUTANTS))
    parser.add_argument("--poison", type=int, action="append", default=[])
    parser.add_argument("--hang", type=engines.Hang.parse)
    parser.add_argument("--version", choices=sorted(versions.VERSIONS))
    chosen = parser.parse_args(own)
    if chosen.version:
        versions.install(chosen.version)
    if chosen.mutant:
        mutants.install(chosen.mutant)
    if chosen.poison:
        engines.poison(chosen.poison)
    if chosen.hang:
        engines.hang(chosen.hang, Path(chosen.marker))
    if chosen.failpoint:
        failpoints.install(chosen.failpoint, Path(chosen.marker), role[role.index("--worker-id") + 1])
    return run(role)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
