"""`python -m cli.readme`: writes the table of settings into README.md, between its two markers."""

from __future__ import annotations

import re
from pathlib import Path

from common.settings import markdown_table

README = Path(__file__).resolve().parents[1] / "README.md"
_MARKED = re.compile(r"(<!-- settings -->\n).*?(\n<!-- /settings -->)", re.DOTALL)


def with_table(text: str) -> str:
    """``text`` with the present table between the markers."""
    return _MARKED.sub(lambda found: found[1] + markdown_table() + found[2], text)


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
