"""`millstream serve` as a person at a terminal meets it: starting, surviving, stopping."""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import redis

from common.bus.embedded import EmbeddedRedis
from tests.helpers.stack import REDIS_URL, ROOT, Stack, clean_environment, millstream
from tests.helpers.waiting import until

NULL = ("--engine", "null", "--null-step-ms", "0")
WORKERS = ("tokenizer", "scheduler", "detokenizer")


def refused(*flags: str) -> str:
    """What `serve` says when it ends with the exit code for unusable settings."""
    done = subprocess.run(
        millstream("serve", *flags),
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def ask(port: int, text: str = "hello") -> str:
    """One short completion from the null engine, asked again while a role is still on its way back."""
    return until(lambda: _asked(port, text), "an answer", timeout=20.0, every=0.2)


def _asked(port: int, text: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = {"model": "smollm2-135m-instruct", "prompt": text, "max_tokens": 4, "seed": 1}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    said = json.loads(reply.read())
    connection.close()
    if reply.status == 503 and reply.getheader("Retry-After"):
        return ""
    assert reply.status == 200, said
    return str(said["choices"][0]["text"])


@pytest.fixture(scope="module")
def serving() -> Iterator[Stack]:
    with Stack(*NULL, "--api-replicas", "2") as running:
        yield running


def test_every_role_is_a_process_that_names_itself(serving: Stack) -> None:
    for role, number in {"serve": 1, "redis": 1, "api": 2, **dict.fromkeys(WORKERS, 1)}.items():
        assert len(serving.pids(role)) == number, role
    # And nothing beside them, but for what a role may start for itself.
    assert all(process.ppid() == serving.pid for process in serving.processes()[1:])


def test_the_terminal_says_what_happens_and_what_to_try(serving: Stack) -> None:
    until(lambda: "Ctrl-C" in serving.logs(), "the words at the end of the start")
    said = serving.logs()
    assert "Redis started" in said
    assert said.count("Try it:") == 1
    command = re.search(r"^curl .*?[^\\]$", said, re.MULTILINE | re.DOTALL)
    assert command
    words = shlex.split(command[0].replace("\\\n", " "))
    assert f"{serving.base_url}/v1/chat/completions" in words
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "smollm2-135m-instruct"
    assert body["stream"] is True


@pytest.mark.parametrize("role", [*WORKERS, "api"])
def test_a_killed_role_comes_back(serving: Stack, role: str) -> None:
    answer = ask(serving.port)
    old = serving.kill(role)
    serving.wait_replaced(role, old)
    serving.wait_ready()
    assert ask(serving.port) == answer


def test_the_port_is_never_lost(serving: Stack) -> None:
    old = serving.kill("api")
    # Nobody can answer at this moment, but the connection waits instead of being refused.
    with socket.create_connection(("127.0.0.1", serving.port), timeout=5):
        pass
    serving.wait_replaced("api", old)
    serving.wait_ready()


def test_a_killed_redis_comes_back_with_its_data(serving: Stack) -> None:
    with serving.redis() as client:
        client.set("kept", "yes")
        old = serving.kill("redis")
        serving.wait_replaced("redis", old)
        serving.wait_redis()
        assert client.get("kept") == "yes"
        client.delete("kept")
    ask(serving.port)


def test_passwords_are_not_on_command_lines(serving: Stack) -> None:
    for process in serving.processes():
        assert "redis://" not in " ".join(process.cmdline())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_soon_and_leaves_nothing(number: signal.Signals) -> None:
    """Also when it reaches the whole foreground group of a terminal: children must not take it themselves."""
    with Stack(*NULL, group=True) as stack:
        data = re.search(r"data=(\S+)", stack.logs())
        before = time.monotonic()
        assert stack.stop(number) == 0
        assert time.monotonic() - before < 5.0
        assert data
        assert not Path(data[1]).exists()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", stack.port), timeout=1)
        assert "Traceback" not in stack.logs()
        assert "died" not in stack.logs()


def test_killing_the_supervisor_takes_everything_down(start_stack: Callable[..., Stack]) -> None:
    stack = start_stack(*NULL)
    everyone = stack.processes()
    os.kill(stack.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(everyone[1:], timeout=5)
    assert not alive


def test_it_stops_while_it_starts() -> None:
    """On the signal of a terminal that was closed, for once."""
    stack = Stack(*NULL)
    try:
        stack.start(wait=False)
        until(lambda: stack.pids("scheduler"), "a scheduler process")
        assert stack.stop(signal.SIGHUP) == 0
    finally:
        stack.discard()


def test_data_survive_a_restart_of_everything(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        stack = Stack(*NULL, "--data-dir", str(tmp_path / "data"), "--appendfsync", "always")
        try:
            stack.start(wait=False)
            until(lambda s=stack: "Redis started" in s.logs(), "Redis")
            with stack.redis() as client:
                found.append(client.getset("kept", "yes"))
                assert client.config_get("appendfsync") == {"appendfsync": "always"}
            assert stack.stop() == 0
        finally:
            stack.discard()
    assert found == [None, "yes"]


def test_it_runs_on_a_redis_of_ones_own(redis_server: EmbeddedRedis) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        client.config_set("requirepass", "secret")
    url = redis_server.url.replace("redis://", "redis://:secret@")
    with Stack(*NULL, env={REDIS_URL: url}) as stack:
        assert stack.pids("redis") == []
        assert ask(stack.port)
        assert not [p for p in stack.processes() if "secret" in " ".join(p.cmdline())]
        assert "secret" not in stack.logs()
        assert stack.stop() == 0
    assert redis_server.is_alive()


def test_a_warm_start_with_the_bundled_model_is_quick(stack: Stack) -> None:
    """Within 15 s on two idle cores; measured in CPU time, since the machine of a test run is not idle."""
    assert stack.start_cost < 20
    assert "loading weights percent=100" in stack.logs()


def test_a_taken_port_is_said_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = refused("--port", str(port))
    assert said == f"millstream serve: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_a_model_that_does_not_exist_ends_it_with_a_clear_line() -> None:
    assert "/does/not/exist" in refused("--port", "0", "--model", "/does/not/exist.gguf")
