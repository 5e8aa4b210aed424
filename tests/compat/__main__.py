"""`python -m tests.compat [NAME ...]`: runs all clients, or those named, and writes docs/compatibility.md.

Clients are installed under `.compat/` when they are first run. The exit code is 1 when one fails.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback

from tests.compat.clients import CLIENTS
from tests.compat.outcome import Outcome, record
from tests.compat.servers import Servers


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.compat", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - CLIENTS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    logging.getLogger().addHandler(logging.NullHandler())
    outcomes: list[Outcome] = []
    with Servers() as servers:
        for name in chosen.names or CLIENTS:
            begun = time.monotonic()
            try:
                outcome = CLIENTS[name](servers)
            except Exception as error:  # whatever is wrong with one client, the others have their turn
                print(f"{name}:", *traceback.format_exception_only(error), sep="\n", flush=True)
                outcome = Outcome(name, "", "", "failed", good=False)
            print(f"{name}: {outcome.result} ({time.monotonic() - begun:.0f} s)", flush=True)
            outcomes.append(outcome)
            if outcome.good:
                record([outcome])
    return 0 if all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
