"""A Redis that cannot carry the bus: one clear line, and the exit code for settings that cannot work."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
import redis

from common.bus.embedded import EmbeddedRedis
from common.bus.keys import Keys
from tests.helpers.stack import ROOT, clean_environment, millstream


def may_evict(client: redis.Redis) -> None:
    client.config_set("maxmemory-policy", "allkeys-lru")


def was_set_up_otherwise(client: redis.Redis) -> None:
    client.hset(Keys().meta(), "partitions", "3")


@pytest.mark.parametrize(
    ("spoil", "advice"),
    [
        (may_evict, "set maxmemory-policy noeviction"),
        (was_set_up_otherwise, "set up with 3 partitions and this process has --partitions 2"),
    ],
)
def test_it_is_said_once_and_clearly(
    redis_server: EmbeddedRedis, spoil: Callable[[redis.Redis], None], advice: str
) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        spoil(client)
    for role in ("serve", "api", "tokenizer", "scheduler", "detokenizer"):
        port = ("--port", "0") if role in {"serve", "api"} else ()
        done = subprocess.run(
            millstream(role, "--redis-url", redis_server.url, "--engine", "null", *port),
            cwd=ROOT,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2, (role, done.stderr)
        lines = (done.stdout + done.stderr).strip().splitlines()
        assert len(lines) == 1, lines
        assert advice in lines[0]
