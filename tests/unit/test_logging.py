"""Log lines for people: one line each, with nothing that a terminal obeys, whatever a client has sent."""

from __future__ import annotations

import logging

import pytest

from common.logging import _TextFormatter


def line(value: object) -> str:
    record = logging.makeLogRecord({"levelname": "INFO", "msg": "said", "fields": {"field": value}})
    return _TextFormatter("api", "api-1").format(record).partition(" field=")[2]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain", "plain"),
        ("é", "é"),
        (1.23456, "1.235"),
        ("two words", "'two words'"),
        ("", "''"),
        ("a\nb", "'a\\nb'"),
        ("\x1b[2J", "'\\x1b[2J'"),
        ("\x9b2J", "'\\x9b2J'"),
        ("\u202egpj.exe", "'\\u202egpj.exe'"),
        ("\x00", "'\\x00'"),
    ],
)
def test_a_value_is_short_and_plain(value: object, shown: str) -> None:
    assert line(value) == shown


def test_a_long_value_is_cut() -> None:
    assert line("x" * 1000) == "x" * 300 + "..."
