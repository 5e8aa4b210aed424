"""Fixtures for all tests: real Redis servers, free ports, and whole running stacks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from xdist.scheduler import LoadFileScheduling

from common.bus.embedded import EmbeddedRedis, free_port
from tests.helpers.servers import binary_of
from tests.helpers.stack import Stack

# Tests that compute share the machine with stacks that other tests left running. OpenMP looks once, when
# torch is imported; the product's own way (`bound_spinning`) is left for the product to take.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# How long an example takes says nothing here: the processes of other tests have the cores half of the time.
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")

#: Files with tests on the stacks that all share, at the end of this file.
ON_SHARED_STACKS = frozenset(
    f"test_{name}.py"
    for name in (
        *("classes", "clients_gone", "concurrency", "context_length", "described_answers", "fixtures"),
        *("killed_workers", "openai_client", "redis_cli", "rows_fields", "serve"),
    )
)


class Scheduling(LoadFileScheduling):
    """Whole files go to a worker, and the files on shared stacks to the same one: each stack starts once."""

    def _split_scope(self, nodeid: str) -> str:
        file = Path(super()._split_scope(nodeid))
        return "shared stacks" if file.name in ON_SHARED_STACKS else str(file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling | None:
    """Whole files stay the default of `make test`; other ways to distribute are xdist's own."""
    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture
def redis_binary(request: pytest.FixtureRequest) -> Path:
    """The server program: Valkey, or what `helpers.servers.BOTH` asks for."""
    return binary_of(getattr(request, "param", "valkey"))


@pytest.fixture
def redis_server(redis_binary: Path) -> Iterator[EmbeddedRedis]:
    """A private empty server for one test.

    On Redis 7 as well with ``@pytest.mark.parametrize("redis_binary", BOTH, indirect=True)``.
    """
    with EmbeddedRedis(binary=redis_binary) as server:
        yield server


@pytest.fixture
def port() -> int:
    """A loopback port nobody listens on."""
    return free_port()


@pytest.fixture
def start_stack() -> Iterator[Callable[..., Stack]]:
    """Starts stacks of one test's own: ``start_stack("--engine", "null", ...)``, all stopped at its end."""
    stacks: list[Stack] = []

    def start(*flags: str, **options: object) -> Stack:
        stack = Stack(*flags, **options)
        stacks.append(stack)
        return stack.start()

    yield start
    for stack in stacks:
        stack.__exit__(None, None, None)


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The bundled model in float32, shared by all tests: leave it as you found it."""
    # No test here is about waiting too long or too many, and the machine may be a slow one.
    waiting = ("--queue-timeout", "300", "--max-queued-requests", "256")
    with Stack("--dtype", "float32", *waiting) as running:
        yield running


@pytest.fixture(scope="session")
def null_stack() -> Iterator[Stack]:
    """The null engine without pauses, shared by all tests: leave it as you found it."""
    with Stack("--engine", "null", "--null-step-ms", "0", "--partitions", "2") as running:
        yield running


@pytest.fixture(scope="session")
def small_stack() -> Iterator[Stack]:
    """The bundled model in float32 with room for little: 512 tokens, two rows, slow prefill."""
    limits = ("--max-model-len", "512", "--max-num-seqs", "2", "--max-num-batched-tokens", "32")
    told = {"OMP_DISPLAY_ENV": "TRUE"}
    with Stack("--dtype", "float32", *limits, "--queue-timeout", "300", env=told) as running:
        yield running
