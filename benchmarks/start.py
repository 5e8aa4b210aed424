"""How long `millstream serve` takes to be ready, and to be gone when idle, with the bundled model.

python -m benchmarks start
"""

from __future__ import annotations

import argparse
import json
import time

from benchmarks.servers import free_port, millstream, running


def main() -> None:
    """Prints one JSON line per start; the first one may find cold files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=4)
    args = parser.parse_args()
    for _ in range(args.repeat):
        port, begun = free_port(), time.perf_counter()
        with running(millstream(port), port, "/ready"):
            ready = time.perf_counter()
        gone = time.perf_counter()
        print(json.dumps({"ready_s": round(ready - begun, 2), "gone_s": round(gone - ready, 2)}), flush=True)


if __name__ == "__main__":
    main()
