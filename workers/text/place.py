"""Where a token stands in a text."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """The place of one token."""

    #: Offset of the character that holds its first byte, in code points.
    at: int
    #: It adds nothing to the text: an end id, a special token that is left out, an id without a token.
    hidden: bool
