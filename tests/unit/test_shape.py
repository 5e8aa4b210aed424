"""The budget that keeps the code readable: small files, small functions, every module explained."""

from __future__ import annotations

import ast

from tests.helpers.source import functions, modules

FILE_LINES = 400
FUNCTION_LINES = 60
#: Nine functions out of ten are shorter than this.
FUNCTION_LINES_P90 = 35

MODULES = modules()
EVERYTHING = [*MODULES, *modules("tests", "benchmarks")]


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def test_files_are_short() -> None:
    assert not [f"{m}: {len(m.lines)} lines" for m in EVERYTHING if len(m.lines) > FILE_LINES]


def test_functions_are_short() -> None:
    measured = [(f"{m}: {f.name}", _length(f)) for m in EVERYTHING for f in functions(m)]
    assert not [f"{name}: {length} lines" for name, length in measured if length > FUNCTION_LINES]


def test_most_functions_are_much_shorter() -> None:
    lengths = sorted(_length(function) for module in MODULES for function in functions(module))
    assert lengths[len(lengths) * 9 // 10] <= FUNCTION_LINES_P90


def test_modules_say_what_they_are_for() -> None:
    assert not [str(m) for m in EVERYTHING if not (ast.get_docstring(m.tree) or "").strip()]


def test_functions_say_what_they_return() -> None:
    assert not [f"{m} line {f.lineno}: {f.name}" for m in MODULES for f in functions(m) if f.returns is None]


def test_nothing_is_left_for_later() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    lines = [(f"{m} line {n}", line) for m in EVERYTHING for n, line in enumerate(m.lines, 1)]
    assert not [where for where, line in lines if any(mark in line for mark in marks)]
