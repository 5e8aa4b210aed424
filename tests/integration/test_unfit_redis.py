"""A Redis that cannot carry the bus: one clear line, and the exit code for settings that cannot work."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import redis

from api import server
from common.bus.embedded import EmbeddedRedis, free_port
from common.bus.keys import Keys
from common.bus.server import UnfitServerError, check_server, wait_for_server
from common.exitcodes import ExitCode
from common.settings import Settings
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
    roles = ("serve", "api", "tokenizer", "scheduler", "detokenizer")
    with ThreadPoolExecutor(len(roles)) as pool:
        runs = list(pool.map(lambda role: _run(role, redis_server.url), roles))
    for role, done in zip(roles, runs, strict=True):
        assert done.returncode == 2, (role, done.stderr)
        lines = (done.stdout + done.stderr).strip().splitlines()
        assert len(lines) == 1, lines
        assert advice in lines[0]


def _run(role: str, url: str) -> subprocess.CompletedProcess[str]:
    port = ("--port", "0") if role in {"serve", "api"} else ()
    return subprocess.run(
        millstream(role, "--redis-url", url, "--engine", "null", "--partitions", "2", *port),
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_whoever_was_not_told_takes_what_the_server_has(redis_server: EmbeddedRedis) -> None:
    keys = Keys()
    assert check_server(redis_server.url, keys, 0, new=3) == 3
    assert check_server(redis_server.url, keys, 0) == 3
    assert wait_for_server(redis_server.url, keys, 3, timeout_s=1.0) == 3
    with pytest.raises(UnfitServerError, match="set up with 3 partitions"):
        check_server(redis_server.url, keys, 2)


def test_an_api_process_that_was_not_told_does_not_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = Settings(redis_url=f"redis://127.0.0.1:{free_port()}")
    monkeypatch.setattr(server, "_REDIS_WAIT_S", 0.2)
    assert server.run(nobody) == ExitCode.FAILED
    assert server._partitions(replace(nobody, partitions=4)) == 4
