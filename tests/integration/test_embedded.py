"""The embedded server: private, durable over crashes, and never alive without its owner."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import redis

from common.bus.embedded import EmbeddedRedis, EmbeddedRedisError
from tests.helpers.servers import BOTH
from tests.helpers.stack import ROOT
from tests.helpers.waiting import until

pytestmark = pytest.mark.parametrize("redis_binary", BOTH, indirect=True)

_OWNER = """
import sys, time
from pathlib import Path
from common.bus.embedded import EmbeddedRedis
server = EmbeddedRedis(binary=Path(sys.argv[1]))
server.start()
print(server.pid, server.data_dir, flush=True)
time.sleep(60)
"""


@pytest.fixture
def client(redis_server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(redis_server.url, decode_responses=True)


def test_it_is_set_up_for_a_bus(client: redis.Redis) -> None:
    wanted = {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction", "save": ""}
    found = {name: client.config_get(name)[name] for name in wanted}
    assert found == wanted
    assert int(client.config_get("maxmemory")["maxmemory"]) == 1 << 30


def test_every_write_can_be_synced(redis_binary: Path) -> None:
    with EmbeddedRedis(binary=redis_binary, appendfsync="always") as server:
        assert redis.Redis.from_url(server.url).config_get("appendfsync")["appendfsync"] == "always"


def test_nobody_else_can_look_in(redis_server: EmbeddedRedis, client: redis.Redis) -> None:
    assert stat.S_IMODE(redis_server.data_dir.stat().st_mode) == 0o700
    assert client.config_get("bind")["bind"] == "127.0.0.1"


@pytest.mark.parametrize("way", ["kill", "stop"])
def test_a_restart_keeps_port_and_data(redis_server: EmbeddedRedis, client: redis.Redis, way: str) -> None:
    client.xadd("stream", {"a": "b"})
    url, pid = redis_server.url, redis_server.pid
    getattr(redis_server, way)()
    assert not redis_server.is_alive()
    redis_server.start()
    assert redis_server.url == url
    assert redis_server.pid != pid
    assert client.xlen("stream") == 1


def test_a_crash_from_outside_is_noticed(redis_server: EmbeddedRedis) -> None:
    pid = redis_server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: not redis_server.is_alive(), "the death is noticed")
    redis_server.start()
    assert redis_server.pid != pid


def test_stopping_is_bounded_even_when_it_hangs(redis_server: EmbeddedRedis) -> None:
    pid = redis_server.pid
    assert pid is not None
    redis_server.signal(signal.SIGSTOP)
    redis_server.stop(timeout=0.3)
    assert not psutil.pid_exists(pid)


def test_closing_removes_what_was_made_here_only(redis_binary: Path, tmp_path: Path) -> None:
    with EmbeddedRedis(binary=redis_binary) as private, EmbeddedRedis(binary=redis_binary, data_dir=tmp_path):
        assert private.data_dir.exists()
    assert not private.data_dir.exists()
    assert any(tmp_path.iterdir())


def test_a_data_directory_has_one_owner(redis_binary: Path, tmp_path: Path) -> None:
    with (
        EmbeddedRedis(binary=redis_binary, data_dir=tmp_path),
        pytest.raises(EmbeddedRedisError, match="in use"),
    ):
        EmbeddedRedis(binary=redis_binary, data_dir=tmp_path)
    with EmbeddedRedis(binary=redis_binary, data_dir=tmp_path) as again:
        assert again.is_alive()


def test_a_server_that_cannot_start_says_why(redis_binary: Path, tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_text("not a directory")
    server = EmbeddedRedis(binary=redis_binary, data_dir=tmp_path)
    with pytest.raises(EmbeddedRedisError, match=r"did not start: .*append"):
        server.start()
    assert not server.is_alive()
    server.close()


def test_cluster_mode_serves_every_slot(redis_binary: Path) -> None:
    with EmbeddedRedis(binary=redis_binary, cluster=True) as server:
        client = redis.Redis.from_url(server.url)
        assert client.mset({"{1}a": "x", "{1}b": "y"})
        with pytest.raises(redis.exceptions.ResponseError, match="same slot"):
            client.mset({"{1}a": "x", "{2}b": "y"})


def test_it_is_gone_when_its_owner_is_killed(redis_binary: Path) -> None:
    command = [sys.executable, "-c", _OWNER, str(redis_binary)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, _, data_dir = owner.stdout.readline().strip().partition(" ")
        server = psutil.Process(int(pid))
        owner.kill()
        owner.wait(10)
        server.wait(timeout=5)
    assert Path(data_dir).is_relative_to(tempfile.gettempdir())
    # Nobody was there to remove its directory: the next one does.
    EmbeddedRedis(binary=redis_binary).close()
    assert not Path(data_dir).exists()
