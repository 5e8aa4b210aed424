"""Clients that leave: whatever their requests hold is free within a second, and nothing of them stays."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.helpers.asking import Body, completion, open_request, whole
from tests.helpers.inside import Inside
from tests.helpers.stack import Stack, role_of
from tests.helpers.waiting import until

#: 500 tokens, so some sixteen steps of prefill.
LONG = "word " * 498
ROUNDS, FLAT = 8, 1 << 20
Record = Callable[[str, object], None]


@pytest.fixture
def inside(small_stack: Stack) -> Iterator[Inside]:
    with small_stack.redis() as client:
        inside = Inside(client)
        inside.wait_free(30)
        yield inside
        inside.wait_free()


def generation(**fields: Any) -> Body:
    """One that takes far longer than any test waits."""
    return completion("word", max_tokens=500, ignore_eos=True, **fields)


@pytest.mark.parametrize(("stream", "n"), [(True, 1), (False, 1), (True, 4)])
@pytest.mark.parametrize("moment", ["at once", "queued", "prefill", "generating"])
def test_a_client_leaves(
    small_stack: Stack, inside: Inside, moment: str, stream: bool, n: int, record_property: Record
) -> None:
    port = small_stack.port
    body = generation(stream=stream, n=n)
    if moment == "prefill":  # of a prompt that is not in the prefix cache
        body = completion(f"{stream}{n} {LONG}", stream=stream, n=n)
    others = [open_request(port, generation()) for _ in range(2 if moment == "queued" else 0)]
    until(lambda: len(inside.in_flight()) == len(others), "others run")
    known = set(inside.in_flight())
    until(lambda: all(inside.generated(uid) for uid in known), "others run", 30)
    admissions = inside.admissions()
    connection = open_request(port, body)
    if moment != "at once":
        uid = until(lambda: next(iter(set(inside.in_flight()) - known), ""), "it is in flight", every=0.002)
        if moment == "queued":
            until(lambda: inside.field(uid, "state") == "waiting", "it is queued")
        else:
            until(lambda: inside.field(uid, "state") == "running", "it runs", every=0.002)
        if moment == "generating":
            until(lambda: inside.generated(uid) >= 3, "tokens", 30)
            if stream:
                got = b""
                while got.count(b"data: ") < 3:
                    got += connection.recv(65536)
    connection.close()
    if moment == "at once":  # the server may notice before it has read the request, or after
        deadline = time.monotonic() + 0.5
        while inside.admissions() == admissions and time.monotonic() < deadline:
            time.sleep(0.01)
    if moment == "queued":
        until(lambda: set(inside.in_flight()) <= known, "its place is free", 5.0)
        assert all(not inside.field(uid, "terminal") for uid in known), "the others go on"
        assert inside.generated(uid) == 0
    for other in others:
        other.close()
    seconds = inside.wait_free()
    record_property("free_s", round(seconds, 3))
    print(f"free after {seconds:.3f} s")
    if moment == "prefill":
        assert inside.generated(uid) == 0, "it was past its prefill"


def test_a_client_resets_the_connection(small_stack: Stack, inside: Inside) -> None:
    connection = open_request(small_stack.port, generation(stream=True))
    assert connection.recv(10)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    inside.wait_free()


@dataclass(frozen=True)
class Use:
    """What a process uses."""

    threads: int
    files: int
    memory: int

    def __sub__(self, other: Use) -> Use:
        return Use(self.threads - other.threads, self.files - other.files, self.memory - other.memory)

    def is_flat(self, role: str) -> bool:
        """Whether this, a growth, is none. Redis keeps what was said for the time to live of its replies."""
        return self.threads <= 0 and self.files <= 0 and (self.memory < FLAT or role == "redis")


Footprint = dict[str, Use]


def footprint(stack: Stack) -> Footprint:
    """By role."""
    return {
        role: Use(process.num_threads(), process.num_fds(), process.memory_info().rss)
        for process in stack.processes()
        if (role := role_of(process))
    }


def open_and_close(port: int, number: int) -> None:
    body = completion(f"request {number}", max_tokens=100, stream=number % 2 == 0, n=1 + number % 3)
    connection = open_request(port, body)
    if number % 4 < 2:
        assert connection.recv(1 + number)
    if number % 5 == 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_opening_and_closing_leaves_nothing(null_stack: Stack) -> None:
    """Rounds of 200, until one of them leaves the processes as they were: a leak would show in each."""
    with null_stack.redis() as client:
        inside = Inside(client)

        def round_of(number: int) -> Footprint:
            for each in range(number):
                open_and_close(null_stack.port, each)
            inside.wait_free(30)
            return footprint(null_stack)

        def lasting() -> set[str]:
            return {key for key in client.scan_iter("*") if client.ttl(key) == -1}

        before = round_of(100)
        keys = lasting()
        for _ in range(ROUNDS):
            after = round_of(200)
            grown = {role: now - before[role] for role, now in after.items()}
            print(grown)
            before = after
            if all(use.is_flat(role) for role, use in grown.items()):
                break
        else:
            raise AssertionError(f"the last 200 requests left {grown}")
        assert lasting() == keys
    assert whole(null_stack.port, completion("still there", max_tokens=3)).finishes == ("length",)
