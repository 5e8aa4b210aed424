"""What came of a client, and the page that says so."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.stack import ROOT

PAGE = ROOT / "docs" / "compatibility.md"
_HEAD = """\
# Clients

What `make compat` found: each client in an environment of its own, in the version of that day, against a real
server. One of them again: `python -m tests.compat openai`.

| client | version | what was run | result | notes |
|---|---|---|---|---|
"""
_ROW = re.compile(r"^\| ([^|]+?) \| [^|]* \| [^|]* \|.*\|$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of the page."""

    client: str
    version: str
    what: str
    result: str
    good: bool
    notes: str = ""

    @property
    def row(self) -> str:
        """As it stands in the table."""
        return f"| {self.client} | {self.version} | {self.what} | {self.result} | {self.notes} |"


def record(outcomes: list[Outcome], page: Path = PAGE) -> None:
    """Writes the page: new rows replace those of the same clients, the others stay."""
    rows: dict[str, str] = {}
    if page.exists():
        rows = {found[1]: found[0] for found in _ROW.finditer(page.read_text())}
        rows.pop("client", None)
    rows |= {outcome.client: outcome.row for outcome in outcomes}
    page.write_text(_HEAD + "\n".join(rows[client] for client in sorted(rows, key=str.lower)) + "\n")
