"""Every protection matters: without it the scenario aimed at it fails, and with all of them none does."""

from __future__ import annotations

import pytest

from tests.chaos.mutants import MUTANTS
from tests.chaos.scenarios import play

#: Which scenario must notice which mutant.
AIMED = {
    "no-fence": "zombie",
    "no-sequence": "emit replies lost",
    "no-offset-compare": "pub replies lost",
    "no-stranded-search": "read replies lost",
    "one-observation": "lapses",
}


@pytest.mark.parametrize("scenario", ["all at once", "lapses"])
def test_the_product_passes(scenario: str) -> None:
    report, problems = play(scenario)
    assert not problems, problems + "\n" + report.logs[-3000:]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_fails(mutant: str) -> None:
    report, problems = play(AIMED[mutant], mutant)
    assert problems, f"nobody noticed {mutant}\n{report.logs[-3000:]}"
    print(problems)
