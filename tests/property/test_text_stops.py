"""The stop matcher against the definition, on texts where near misses are everywhere."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.text.stops import StopMatcher, StopSet

TEXT = st.text("ab日\n", max_size=40)
STOPS = st.lists(st.text("ab日\n", min_size=1, max_size=6), min_size=1, max_size=5)


def first_match(text: str, stops: list[str], start: int = 0) -> tuple[int, str] | None:
    """(end, stop) of the match that completes first after ``start``; of several, the first of the list."""
    for end in range(start + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end, stop
    return None


def must_hold(text: str, stops: list[str]) -> int:
    """Length of the longest suffix that is a proper prefix of a stop string."""
    lengths = [
        size
        for stop in stops
        for size in range(1, len(stop))
        if size <= len(text) and text.endswith(stop[:size])
    ]
    return max(lengths, default=0)


@given(TEXT, STOPS, st.booleans(), st.data())
@settings(max_examples=300)
def test_matches_cuts_and_holds_by_definition(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    matcher = StopMatcher(StopSet(stops), include_stop=include)
    released, expected = "", first_match(text, stops)
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        more, stop = matcher.push(text[start:end])
        released += more
        if expected is not None and expected[0] <= end:
            at, wanted = expected
            assert stop == wanted
            assert released == (text[:at] if include else text[: at - len(wanted)])
            return
        assert stop is None
        assert released == text[: end - must_hold(text[:end], stops)]
    assert released + matcher.flush() == text


@given(TEXT, TEXT, STOPS)
def test_a_match_counts_when_its_end_is_armed(before: str, after: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopSet(stops), include_stop=True)
    first, stop = matcher.push(before, armed=False)
    assert (first, stop) == (before[: len(before) - must_hold(before, stops)], None)
    more, stop = matcher.push(after)
    expected = first_match(before + after, stops, start=len(before))
    if expected is None:
        assert stop is None
        assert first + more + matcher.flush() == before + after
    else:
        assert (first + more, stop) == ((before + after)[: expected[0]], expected[1])
