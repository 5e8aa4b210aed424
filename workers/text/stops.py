"""Finds stop strings in text that arrives in pieces, holding back no more than could still become one.

An Aho-Corasick automaton over code points: one step per character whatever the number and length of the
stop strings, and its state is exactly "the longest suffix that begins a stop string".
"""

from __future__ import annotations

from collections.abc import Sequence


class StopSet:
    """The automaton of a set of stop strings, shared by all the choices of a request.

    Nodes are prefixes of stop strings; node 0 is the empty one.
    """

    __slots__ = ("children", "fail", "first", "hold", "match", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stop for stop in stops if stop)
        self.children: list[dict[str, int]] = [{}]
        depth = [0]
        #: Index of the stop string that ends at a node, the first of the list if several do; -1 for none.
        self.match: list[int] = [-1]
        for index, stop in enumerate(self.stops):
            node = 0
            for char in stop:
                child = self.children[node].get(char)
                if child is None:
                    child = len(self.children)
                    self.children[node][char] = child
                    self.children.append({})
                    self.match.append(-1)
                    depth.append(depth[node] + 1)
                node = child
            if self.match[node] < 0:
                self.match[node] = index
        #: The longest proper suffix of a node that is a node too.
        self.fail = [0] * len(self.children)
        #: Length of the longest suffix that is a *proper* prefix of a stop string: what must be held.
        self.hold = list(depth)
        self._link()
        self.first = frozenset(self.children[0])

    def _link(self) -> None:
        queue = list(self.children[0].values())  # breadth first: a node's suffixes come before it
        for node in queue:
            fail = self.fail[node]
            if not self.children[node]:
                self.hold[node] = self.hold[fail]
            ends = [index for index in (self.match[node], self.match[fail]) if index >= 0]
            self.match[node] = min(ends, default=-1)
            for char, child in self.children[node].items():
                self.fail[child] = self.step(fail, char)
                queue.append(child)

    def step(self, node: int, char: str) -> int:
        """The node after ``char``: amortized constant, since each failed try shortens the suffix."""
        children = self.children
        while True:
            child = children[node].get(char)
            if child is not None:
                return child
            if not node:
                return 0
            node = self.fail[node]


class StopMatcher:
    """Watches one text for stop strings.

    The match that is complete first wins; of those complete at the same character, the first of the list.
    """

    __slots__ = ("_held", "_include", "_node", "_set")

    def __init__(self, stops: StopSet, *, include_stop: bool) -> None:
        self._set = stops
        self._include = include_stop
        self._node = 0
        self._held = ""

    @property
    def held(self) -> str:
        """The text held back now."""
        return self._held

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """The text to release, and the stop string that ended it. While not ``armed`` nothing ends it."""
        stops, node = self._set, self._node
        if not node and stops.first.isdisjoint(text):
            return text, None
        for place, char in enumerate(text, 1):
            node = stops.step(node, char)
            if armed and stops.match[node] >= 0:
                stop = stops.stops[stops.match[node]]
                whole = self._held + text[:place]
                self._node, self._held = 0, ""
                return (whole if self._include else whole[: -len(stop)]), stop
        whole = self._held + text
        self._node = node
        cut = len(whole) - stops.hold[node]
        self._held = whole[cut:]
        return whole[:cut], None

    def flush(self) -> str:
        """The text held back, which can no longer become a stop string."""
        held, self._node, self._held = self._held, 0, ""
        return held
