"""What the path around the engine costs: tokens per CPU-second of all server processes, Redis included.

The null engine makes tokens without a model. 64 streams at a time, 64 tokens each, one SSE event per token.
    python -m benchmarks.bus
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics

from benchmarks.client import run_load
from benchmarks.servers import Server, free_port, millstream, running

MODEL = "smollm2-135m-instruct"


def measure(server: Server, *, streams: int, tokens: int, rounds: int) -> dict[str, object]:
    """One round of ``streams`` * 4 requests: tokens per CPU-second, and each role's microseconds a token."""
    bodies: list[dict[str, object]] = [
        {"model": MODEL, "prompt": "benchmark", "max_tokens": tokens, "seed": i}
        for i in range(streams * rounds)
    ]
    before = server.cpu_seconds()
    load = asyncio.run(run_load(server.port, "/v1/completions", bodies, streams))
    after = server.cpu_seconds()
    spent = {role: after[role] - before.get(role, 0.0) for role in after}
    if load.events < load.tokens * 0.99:
        raise RuntimeError(f"{load.events} events for {load.tokens} tokens: not one event per token")
    return {
        "tokens_per_cpu_second": round(load.tokens / sum(spent.values())),
        "tokens_per_second": round(load.tokens_per_second),
        "ttft_ms": round(load.median("ttft"), 1),
        "us_per_token": {role: round(1e6 * s / load.tokens, 1) for role, s in sorted(spent.items())},
    }


def main() -> None:
    """Prints one JSON line per repetition, and the median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=8, help="requests per stream and repetition")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    port = free_port()
    command = millstream(port, "--engine", "null", "--null-step-ms", str(args.step_ms))
    with running(command, port, "/ready") as server:
        measure(server, streams=args.streams, tokens=args.tokens, rounds=1)
        results = []
        for _ in range(args.repeat):
            result = measure(server, streams=args.streams, tokens=args.tokens, rounds=args.rounds)
            results.append(result["tokens_per_cpu_second"])
            print(json.dumps(result), flush=True)
    print(f"median: {statistics.median(results):.0f} tokens per CPU-second")


if __name__ == "__main__":
    main()
