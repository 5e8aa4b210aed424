"""From the engine to the client: milliseconds from a token's making to its bytes at the client's socket.

The null engine, all roles, one process each, every stream read by one client on the same machine; so the time
holds the client's own turn as well. Percentiles over all tokens.
    python -m benchmarks latency
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.bus import MODEL
from benchmarks.client import Load, run_load
from benchmarks.servers import free_port, wait_ready
from common.bus.embedded import EmbeddedRedis

_STOP_TIMEOUT_S = 10.0


@contextlib.contextmanager
def roles(redis_url: str, port: int, stamps: Path, step_ms: float) -> Iterator[None]:
    """One process of each role while the block runs; the scheduler writes ``stamps``."""
    shared = ["--redis-url", redis_url, "--engine", "null", "--log-level", "warning"]
    commands = [
        ["-m", "cli", "tokenizer", *shared],
        ["-m", "cli", "detokenizer", *shared],
        ["-m", "cli", "api", "--port", str(port), *shared],
        ["-m", "benchmarks.stamped", str(stamps), "--", *shared, "--null-step-ms", str(step_ms)],
    ]
    with contextlib.ExitStack() as stack:
        for command in commands:
            process = subprocess.Popen([sys.executable, *command])
            stack.callback(process.wait, _STOP_TIMEOUT_S)
            stack.callback(process.terminate)
        wait_ready(port, "/ready")
        yield


def delays(load: Load, stamps: Path) -> np.ndarray:
    """Milliseconds from making to arrival, of every token that came in an event of its own."""
    made: dict[str, dict[int, int]] = {}
    for line in stamps.read_text().splitlines():
        key, index, moment = line.split()
        made.setdefault(key.partition("/")[0], {})[int(index)] = int(moment)
    return np.array(
        [
            1000 * (stream.started + event) - made[stream.uid][index] / 1e6
            for stream in load.streams
            if len(stream.events) == stream.completion_tokens
            for index, event in enumerate(stream.events)
        ]
    )


def main() -> None:
    """Prints one JSON line per number of streams."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=4, help="requests per stream")
    args = parser.parse_args()
    for streams in args.streams:
        with tempfile.TemporaryDirectory() as folder, EmbeddedRedis() as server:
            port, stamps = free_port(), Path(folder) / "stamps"
            bodies: list[dict[str, object]] = [
                {"model": MODEL, "prompt": "benchmark", "max_tokens": args.tokens, "seed": i}
                for i in range(streams * args.rounds)
            ]
            with roles(server.socket_url, port, stamps, args.step_ms):
                load = asyncio.run(run_load(port, "/v1/completions", bodies, streams))
            found = delays(load, stamps)
            cuts = dict(zip(("p50", "p90", "p99"), np.percentile(found, (50, 90, 99)).round(2), strict=True))
            print(json.dumps({"streams": streams, "tokens": len(found), "ms": cuts}), flush=True)


if __name__ == "__main__":
    main()
