"""Rate limits of API keys on a real server: what is refused, what is told, what it costs in the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidRequestError
from common.messages import Request
from tests.helpers.api_process import Answer, ApiProcess, Stage, stage
from tests.helpers.fake_workers import Play
from tests.helpers.keys import bearer, make_key
from tests.helpers.waiting import until

BODY: dict[str, Any] = {"model": "test-model", "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("rates"), "--auth", "required") as running:
        yield running


@pytest.fixture(autouse=True)
def _usual(running: Stage) -> Iterator[None]:
    yield
    running.workers.script = lambda request: Play()
    running.workers.working = True


class Key:
    """A key with limits, in use."""

    def __init__(self, running: Stage, *options: str) -> None:
        self.running = running
        self.id, self.secret = make_key(running.redis.url, *options)
        until(
            lambda: running.api.request("GET", "/v1/models", headers=self.headers).status == 200, "known", 10
        )

    @property
    def headers(self) -> dict[str, str]:
        return dict(bearer(self.secret))

    def chat(
        self, api: ApiProcess | None = None, headers: dict[str, str] | None = None, **more: Any
    ) -> Answer:
        return (api or self.running.api).post(CHAT, BODY | more, self.headers | (headers or {}))

    def used(self, name: str) -> float:
        """What counts now, less what has drained since (little, in a test)."""
        workers = self.running.workers
        return float(workers.bus.do("HGET", workers.keys.rate(self.id), name) or 0)

    def settled(self) -> bool:
        bus = self.running.workers.bus
        charges = bus.do("KEYS", self.running.workers.keys.charge(self.id, "-*").replace("{", "[{]"))
        return bool(charges) and all(bus.do("GET", charge) == b"settled" for charge in charges)


def test_requests_per_minute_on_all_replicas(running: Stage, tmp_path: Path) -> None:
    key = Key(running, "--requests-per-minute", "4")
    with ApiProcess(running.redis.url, log=tmp_path / "second.log") as second:
        second.wait_ready()
        for left, api in zip("3210", (running.api, second) * 2, strict=True):
            got = key.chat(api)
            assert got.status == 200
            assert got.headers["x-ratelimit-limit-requests"] == "4"
            assert got.headers["x-ratelimit-remaining-requests"] == left
            assert got.headers["x-ratelimit-reset-requests"].endswith("s")
            assert "x-ratelimit-limit-tokens" not in got.headers
        for api in (running.api, second):
            for stream in (False, True):
                got = key.chat(api, stream=stream)
                assert got.status == 429
                assert (got.error["type"], got.error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
                assert "requests per minute" in got.error["message"]
                assert 1 <= int(got.headers["retry-after"]) <= 15
                assert 1000 <= int(got.headers["retry-after-ms"]) <= 15_000
                assert got.headers["x-ratelimit-remaining-requests"] == "0"
    assert running.api.request("GET", "/v1/models", headers=key.headers).status == 200, "only work is limited"
    assert Key(running, "--requests-per-minute", "4").chat().status == 200, "others are not"


def test_a_crowd_gets_no_more_than_its_limit(running: Stage) -> None:
    key = Key(running, "--requests-per-minute", "10")
    with ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(lambda _: key.chat().status, range(30)))
    assert answers.count(200) == 10 + (answers.count(200) > 10)  # one comes back in six seconds
    assert answers.count(429) == 30 - answers.count(200)


def test_tokens_cost_what_they_were(running: Stage) -> None:
    """The script says three tokens and an end to a prompt of three; 500 were asked for."""
    key = Key(running, "--tokens-per-minute", "1000")
    for stream in (False, True):
        before = key.used("tokens")
        got = key.chat(
            stream=stream, max_tokens=500, **({"stream_options": {"include_usage": True}} if stream else {})
        )
        assert got.status == 200
        assert got.headers["x-ratelimit-limit-tokens"] == "1000"
        assert int(got.headers["x-ratelimit-remaining-tokens"]) <= 500
        until(key.settled, "it is settled", 10)
        said = (got.events()[-2] if stream else got.json())["usage"]["total_tokens"]
        assert before - 20 * 17 < key.used("tokens") - said <= before
    assert key.chat(max_tokens=900).status == 200, "what was not used is there again"
    assert key.chat(n=4, max_tokens=300).status == 429, "each choice may use as much"


def test_no_answer_is_longer_than_the_context(running: Stage) -> None:
    """Clients write down the largest number there is; a key that lost its API would wait it off for years."""
    key = Key(running, "--tokens-per-minute", "4096")
    got = key.chat(max_tokens=2**31 - 1, n=2)
    assert got.status == 200
    assert got.headers["x-ratelimit-reset-tokens"].startswith(("1m59", "2m0"))


def test_debt_is_paid(running: Stage) -> None:
    """Nobody knows how long an answer is that has no bound: it counts once it is there."""
    running.workers.script = lambda request: Play(texts=("x",) * 300, finish="length", silent_tokens=0)
    key = Key(running, "--tokens-per-minute", "200")
    assert key.chat().status == 200
    until(key.settled, "it is settled", 10)
    got = key.chat()
    assert got.status == 429
    assert "tokens per minute" in got.error["message"]
    assert 25_000 < int(got.headers["retry-after-ms"]) < 60_000


def test_leaving_does_not_make_it_cheaper(running: Stage) -> None:
    gate = threading.Event()
    running.workers.script = lambda request: Play(
        texts=("x",) * 200, before=lambda request, index: gate.wait(30) if index == 150 else None
    )
    key = Key(running, "--tokens-per-minute", "1000")
    with running.api.open(CHAT, BODY | {"stream": True}, key.headers) as connection:
        got = b""
        while got.count(b"data: ") < 150:
            got += connection.recv(65536)
        assert key.used("tokens") < 60, "the estimate of the prompt alone"
    gate.set()
    until(key.settled, "it is settled", 20)
    assert key.used("tokens") > 100


def refuse(request: Request) -> Play:
    raise InvalidRequestError("No.")


def test_what_came_to_nothing_costs_no_tokens(running: Stage) -> None:
    running.workers.script = refuse
    key = Key(running, "--tokens-per-minute", "1000", "--requests-per-minute", "100")
    assert key.chat(max_tokens=500).status == 400
    until(key.settled, "it is settled", 10)
    assert key.used("tokens") == 0
    assert key.used("requests") > 0.5, "but it was a request"


def test_what_was_not_admitted_costs_nothing(tmp_path: Path) -> None:
    flags = ("--auth", "required", "--max-queued-requests", "1")
    with stage(tmp_path, *flags, working=False) as running:
        key = Key(running, "--tokens-per-minute", "100000", "--requests-per-minute", "100")
        with running.api.open(CHAT, BODY, key.headers):
            until(lambda: key.used("requests") > 0.9, "one waits")
            for extra in ({}, {"idempotency-key": "k"}):
                answers = [key.chat(max_tokens=500, headers=extra) for _ in range(5)]
                full = [got for got in answers if got.status == 429]
                assert full, "the queue is full, on one partition at least"
                assert {got.error["message"] for got in full} == {
                    "The server's queue is full, try again later."
                }
            until(lambda: key.used("requests") < 1.5, "they are taken back", 10)
            running.workers.working = True


def test_joining_by_idempotency_key_costs_once(running: Stage) -> None:
    key = Key(running, "--requests-per-minute", "100")
    for _ in range(5):
        assert key.chat(headers={"idempotency-key": "join"}).status == 200
    assert key.used("requests") <= 1


def test_a_body_that_is_not_valid_costs_nothing(running: Stage) -> None:
    key = Key(running, "--requests-per-minute", "100")
    for _ in range(5):
        assert key.chat(temperature=9).status == 400
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    got = key.chat(chat_template_kwargs={"deep": deep})
    assert (got.status, got.error["message"]) == (400, "The request is nested too deeply.")
    assert key.used("requests") == 0
    assert running.api.post("/tokenize", {"prompt": "x"}, key.headers).status == 200
    assert key.used("requests") == pytest.approx(1, abs=0.5)


def test_the_sdk_reads_it(running: Stage) -> None:
    openai = pytest.importorskip("openai")
    key = Key(running, "--requests-per-minute", "1")
    with openai.OpenAI(base_url=f"{running.api.base_url}/v1", api_key=key.secret, max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(**BODY)
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(**BODY)
    with (
        openai.OpenAI(base_url=f"{running.api.base_url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
