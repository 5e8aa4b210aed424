"""`python -m benchmarks`: the path around the engine, then the whole stack on the bundled model.

Flags go to the benchmark named first: `python -m benchmarks bus --streams 256`.
"""

from __future__ import annotations

import signal
import sys

from benchmarks import bus, engine, latency, start

_ALL = {"bus": bus.main, "latency": latency.main, "start": start.main, "engine": engine.main}


def main() -> int:
    """Runs the named benchmark, or all."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name and name not in _ALL:
        print(f"benchmarks: {', '.join(_ALL)}", file=sys.stderr)
        return 2
    del sys.argv[1:2]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped, too
    for each in [name] if name else list(_ALL):
        print(f"# {each}", flush=True)
        _ALL[each]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
