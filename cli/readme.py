"""`python -m cli.readme`: writes the table of settings into README.md, between its two markers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from common.settings import ROLES, TABLE, Command, Setting

README = Path(__file__).resolve().parents[1] / "README.md"
_MARKED = re.compile(r"(<!-- settings -->\n).*?(\n<!-- /settings -->)", re.DOTALL)


def with_table(text: str) -> str:
    """``text`` with the present table between the markers."""
    return _MARKED.sub(lambda found: found[1] + markdown_table() + found[2], text)


def markdown_table(rows: Sequence[Setting] = TABLE) -> str:
    """The configuration table of the README."""
    head = ["| flag | variable | value | default | commands | meaning |", "|---|---|---|---|---|---|"]
    return "\n".join(head + [_row(row) for row in rows if not row.spec.internal])


def _row(row: Setting) -> str:
    everywhere = (Command.SERVE, *ROLES)
    commands = "all" if row.spec.commands[: len(everywhere)] == everywhere else ", ".join(row.spec.commands)
    cells = (
        f"`{row.flag}`",
        f"`{row.env}`",
        row.spec.kind.label,
        row.spec.default_text,
        commands,
        row.spec.help,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
