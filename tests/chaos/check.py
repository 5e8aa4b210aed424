"""The verdict on one request: what its client saw against the only right answer, token by token."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tests.chaos.load import Outcome
from tests.chaos.plans import Manner
from tests.helpers.asking import Reply, reply_of, reply_of_answer


@dataclass(slots=True)
class Verdict:
    """Tokens lost, doubled and out of order over all choices, and what else is wrong, in words."""

    outcome: Outcome
    lost: int = 0
    doubled: int = 0
    reordered: int = 0
    wrong: str = ""

    @property
    def good(self) -> bool:
        return not (self.lost or self.doubled or self.reordered or self.wrong)

    def __str__(self) -> str:
        plan = self.outcome.plan
        return (
            f"request {plan.number} ({plan.manner}, uid {self.outcome.uid}): lost {self.lost}, doubled "
            f"{self.doubled}, reordered {self.reordered}; {self.wrong or 'nothing else'}"
        )


def judge(
    outcome: Outcome, prompt_tokens: int, *, cuts_allowed: bool, losses_allowed: bool = False
) -> Verdict:
    """``cuts_allowed``: API processes were killed, so connections may break off.

    ``losses_allowed``: Redis was killed, so who comes back after its API process died in the same two seconds
    may get an error; never a gap or a repeat.
    """
    verdict = Verdict(outcome)
    plan = outcome.plan
    if outcome.hung:
        verdict.wrong = f"it has not ended ({len(outcome.events)} events)"
    elif plan.manner is Manner.ERRS:
        said = (outcome.error or {}).get("code")
        if outcome.status != 400 or said != "context_length_exceeded":
            verdict.wrong = f"a bad request got {outcome.status} {outcome.error}"
    elif outcome.error is not None and outcome.returns and losses_allowed:
        _compare_beginning(verdict)
    elif outcome.error is not None:
        verdict.wrong = f"status {outcome.status}, error {outcome.error}"
    elif outcome.left or (outcome.cut and cuts_allowed):
        _compare_beginning(verdict)
    elif outcome.cut or not outcome.done:
        verdict.wrong = "the answer breaks off"
    else:
        _compare_whole(verdict, prompt_tokens)
    return verdict


def _compare_whole(verdict: Verdict, prompt_tokens: int) -> None:
    outcome, expected = verdict.outcome, verdict.outcome.plan.expected
    try:
        reply: Reply = (
            reply_of(outcome.events) if outcome.plan.is_stream else reply_of_answer(outcome.events[0])
        )
    except (AssertionError, KeyError, ValueError) as error:
        verdict.wrong = f"the events do not make a reply: {error!r}"
        return
    if len(reply.texts) != len(expected.texts):
        verdict.wrong = f"{len(reply.texts)} choices instead of {len(expected.texts)}"
        return
    for got, right in zip(reply.texts, expected.texts, strict=True):
        _compare(verdict, got, right)
    facts = (reply.finishes, reply.stops, reply.usage)
    right_facts = (expected.finishes, expected.stops, (prompt_tokens, sum(expected.tokens)))
    if facts != right_facts:
        verdict.wrong = f"{facts} instead of {right_facts}"


def _compare_beginning(verdict: Verdict) -> None:
    """What came before the connection ended must be the beginning of what was to come."""
    texts: dict[int, str] = {}
    for event in verdict.outcome.events:
        for choice in event["choices"]:
            if "delta" in choice or "text" in choice:
                text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                texts[choice["index"]] = texts.get(choice["index"], "") + text
    for index, text in texts.items():
        _compare(verdict, text, verdict.outcome.plan.expected.texts[index][: len(text)])


def _compare(verdict: Verdict, got: str, right: str) -> None:
    """A character is a token."""
    if got == right:
        return
    missing, extra = Counter(right) - Counter(got), Counter(got) - Counter(right)
    verdict.lost += missing.total()
    verdict.doubled += extra.total()
    if not missing and not extra:
        verdict.reordered += sum(a != b for a, b in zip(got, right, strict=True))
