"""From the engine to the client: milliseconds from a token's making to its bytes on the socket, and there.

The null engine, all roles, one process each, every stream read by one client on the same machine: the second
time holds the client's own turn as well, and both the turns it takes from the server. Percentiles of tokens.
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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from benchmarks.bus import MODEL
from benchmarks.client import Load, run_load
from benchmarks.servers import free_port, wait_ready
from common.bus.embedded import EmbeddedRedis

_STOP_TIMEOUT_S = 10.0


@contextlib.contextmanager
def roles(redis_url: str, port: int, made: Path, written: Path, step_ms: float) -> Iterator[None]:
    """One process of each role while the block runs; scheduler and API note what they do when."""
    shared = ["--redis-url", redis_url, "--engine", "null", "--log-level", "warning"]
    commands = [
        ["-m", "cli", "tokenizer", *shared],
        ["-m", "cli", "detokenizer", *shared],
        ["-m", "benchmarks.stamped", "api", str(written), "--", "--port", str(port), *shared],
        ["-m", "benchmarks.stamped", "scheduler", str(made), "--", *shared, "--null-step-ms", str(step_ms)],
    ]
    with contextlib.ExitStack() as stack:
        for command in commands:
            process = subprocess.Popen([sys.executable, *command])
            stack.callback(process.wait, _STOP_TIMEOUT_S)
            stack.callback(process.terminate)
        wait_ready(port, "/ready")
        yield


def read(stamps: Path) -> Iterator[tuple[str, int, int]]:
    """What a role noted: a request, a number, nanoseconds."""
    for line in stamps.read_text().splitlines():
        uid, number, moment = line.split()
        yield uid, int(number), int(moment)


def to_client(load: Load, made: Mapping[tuple[str, int], int]) -> Iterator[float]:
    """Milliseconds from making to arrival, of every token that came in an event of its own."""
    for stream in load.streams:
        if len(stream.events) == stream.completion_tokens:
            for index, event in enumerate(stream.events):
                yield 1000 * (stream.started + event) - made[stream.uid, index] / 1e6


def to_socket(written: Path, made: Mapping[tuple[str, int], int]) -> Iterator[float]:
    """Milliseconds from making to the end of the write, of every token but the last of its stream."""
    passed: Counter[str] = Counter()
    for uid, events, moment in read(written):
        for index in range(passed[uid], passed[uid] + events):
            yield (moment - made[uid, index]) / 1e6
        passed[uid] += events


def cuts(delays: Iterable[float]) -> dict[str, float]:
    """Percentiles."""
    found = np.percentile(np.fromiter(delays, float), (50, 90, 99)).round(2)
    return dict(zip(("p50", "p90", "p99"), found.tolist(), strict=True))


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
            port, made, written = free_port(), Path(folder) / "made", Path(folder) / "written"
            bodies: list[dict[str, object]] = [
                {"model": MODEL, "prompt": "benchmark", "max_tokens": args.tokens, "seed": i}
                for i in range(streams * args.rounds)
            ]
            with roles(server.socket_url, port, made, written, args.step_ms):
                load = asyncio.run(run_load(port, "/v1/completions", bodies, streams))
            moments = {(uid, index): moment for uid, index, moment in read(made)}
            found = {"socket": cuts(to_socket(written, moments)), "client": cuts(to_client(load, moments))}
            print(json.dumps({"streams": streams, "tokens": load.tokens, "ms": found}), flush=True)


if __name__ == "__main__":
    main()
