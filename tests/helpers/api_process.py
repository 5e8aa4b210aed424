"""One `millstream api` as a real process, for tests of the API alone."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from common.bus.embedded import EmbeddedRedis, free_port
from tests.helpers.fake_workers import FakeWorkers
from tests.helpers.stack import ROOT, clean_environment, millstream
from tests.helpers.waiting import until


@dataclass(frozen=True)
class Answer:
    """A complete HTTP answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object; fails when the body is not exactly of OpenAI's shape."""
        value = self.json()
        assert set(value) == {"error"}, value
        assert set(value["error"]) == {"message", "type", "param", "code"}, value
        assert isinstance(value["error"]["message"], str)
        assert value["error"]["message"]
        return value["error"]

    def events(self) -> list[Any]:
        """The events of a stream: parsed, but for the last, which stays `[DONE]`."""
        blocks = self.body.decode().split("\n\n")
        assert blocks.pop() == "", "the stream does not end with an empty line"
        blocks = [block for block in blocks if block != ": keep-alive"]
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        data = [block.removeprefix("data: ") for block in blocks]
        return [each if each == "[DONE]" else json.loads(each) for each in data]


class ApiProcess:
    """Runs until closed; a stop in good order must exit with 0."""

    def __init__(self, redis_url: str, *flags: str, log: Path) -> None:
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._arguments = millstream("api", "--redis-url", redis_url, "--port", str(self.port), *flags)
        self._log = log
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._log.open("ab") as output:
            self.process = subprocess.Popen(
                self._arguments, cwd=ROOT, env=clean_environment(), stdout=output, stderr=subprocess.STDOUT
            )
        until(self.answers, "the API listens", 20.0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                code = self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
                raise
            if kind is None:
                assert code == 0, self.log()[-4000:]

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log()[-4000:]
        try:
            return self.get("/health").status == 200
        except OSError:
            return False

    def wait_ready(self) -> None:
        until(lambda: self.get("/ready").status == 200, "/ready", 10.0)

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30.0)
        try:
            connection.request(method, path, body, dict(headers or {}))
            got = connection.getresponse()
            return Answer(got.status, {k.lower(): v for k, v in got.getheaders()}, got.read())
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        return self.request("GET", path)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """POST a value as JSON, or bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, data, {"content-type": "application/json", **(headers or {})})

    def chat(self, content: Any = "one two three", **fields: Any) -> Answer:
        body = {"model": "test-model", "messages": [{"role": "user", "content": content}], **fields}
        return self.post("/v1/chat/completions", body)

    def complete(self, prompt: Any = "one two three", **fields: Any) -> Answer:
        return self.post("/v1/completions", {"model": "test-model", "prompt": prompt, **fields})

    def open(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> socket.socket:
        """Send a request and leave the answer unread; the caller closes the socket."""
        data = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30.0)
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        return connection


@dataclass(frozen=True)
class Stage:
    """An API process on a Redis of its own, with scripted workers."""

    api: ApiProcess
    workers: FakeWorkers
    redis: EmbeddedRedis


@contextmanager
def stage(folder: Path, *flags: str, **workers: Any) -> Iterator[Stage]:
    """A running `Stage`; ``workers`` are the options of `FakeWorkers`."""
    with (
        EmbeddedRedis() as redis,
        FakeWorkers(redis.url, **workers) as cast,
        ApiProcess(redis.url, *flags, log=folder / "api.log") as api,
    ):
        if cast.roles:
            api.wait_ready()
        yield Stage(api, cast, redis)
