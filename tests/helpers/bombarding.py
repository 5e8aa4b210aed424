"""Many made-up requests against one running server, which must come through as if nothing had been."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.helpers.api_process import Answer
from tests.helpers.asking import completion, null_text, whole
from tests.helpers.fuzzing import any_requests, garbage, right_requests
from tests.helpers.raw_http import Raw, ask, exchange, parse
from tests.helpers.stack import Stack

#: For the server: requests without a limit of their own stay short, and no queue is ever full.
FLAGS = ("--engine", "null", "--null-step-ms", "0", "--max-model-len", "256", "--max-queued-requests", "64")
_ROLES = ("api", "tokenizer", "scheduler", "detokenizer", "redis")
#: Every so many requests the neighbour asks.
_NEIGHBOUR_EVERY = 25


def _check(answer: Answer) -> None:
    """No fault of the server's, and every error in the one shape."""
    assert answer.status < 500, answer
    assert answer.headers["x-request-id"], answer
    if answer.status >= 400 and answer.body:
        assert answer.headers["content-type"] == "application/json"
        assert answer.error["type"] == "invalid_request_error"
        assert len(answer.body) < 3000, "an error does not repeat what was sent"


class Bombardment:
    """Asks ``stack`` made-up things, and a neighbour's question in between."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._pids = {role: stack.pids(role) for role in _ROLES}
        #: What came back, by status; 0 is for a connection closed without an answer.
        self.statuses: Counter[int] = Counter()

    def run(self, examples: int, start: int = 0) -> None:
        """About ``examples`` requests, a third of them right; ``start`` chooses which."""
        rules = settings(
            max_examples=examples,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        one = st.one_of(right_requests.map(lambda raw: (True, raw)), any_requests.map(lambda r: (False, r)))
        seed(start)(rules(given(one)(self._ask)))()
        seed(start)(rules(given(garbage)(self._garbage)))()
        self.unharmed()

    def unharmed(self) -> None:
        """The neighbour is answered right, and every process is the one it was."""
        body = completion("x", max_tokens=20, seed=7, ignore_eos=True)
        assert whole(self._stack.port, body).text == null_text(7, 20)
        assert {role: self._stack.pids(role) for role in _ROLES} == self._pids
        _, _, fault = self._stack.logs().partition("Traceback")
        assert not fault, fault[:4000]

    def _ask(self, made: tuple[bool, Raw]) -> None:
        right, request = made
        answer = ask(self._stack.port, request)
        if right:
            assert answer is not None
            assert answer.status == 200, answer
        self._take(answer)

    def _garbage(self, data: bytes) -> None:
        self._take(parse(exchange(self._stack.port, data), b"GET"))

    def _take(self, answer: Answer | None) -> None:
        if answer is not None:
            _check(answer)
        self.statuses[answer.status if answer else 0] += 1
        if self.statuses.total() % _NEIGHBOUR_EVERY == 0:
            self.unharmed()
