"""The budget that keeps the code readable: small files, small functions, every module explained."""

from __future__ import annotations

import ast

import pytest

from tests.helpers.source import Module, functions, modules

FILE_LINES = 400
FUNCTION_LINES = 60
#: Nine functions out of ten are shorter than this.
FUNCTION_LINES_P90 = 35

MODULES = modules()
EVERYTHING = [*MODULES, *modules("tests", "benchmarks")]


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


@pytest.mark.parametrize("module", EVERYTHING, ids=str)
def test_files_are_short(module: Module) -> None:
    assert len(module.lines) <= FILE_LINES


@pytest.mark.parametrize("module", EVERYTHING, ids=str)
def test_functions_are_short(module: Module) -> None:
    long = [f"{f.name}: {_length(f)} lines" for f in functions(module) if _length(f) > FUNCTION_LINES]
    assert not long


def test_most_functions_are_much_shorter() -> None:
    lengths = sorted(_length(function) for module in MODULES for function in functions(module))
    assert lengths[len(lengths) * 9 // 10] <= FUNCTION_LINES_P90


@pytest.mark.parametrize("module", EVERYTHING, ids=str)
def test_modules_say_what_they_are_for(module: Module) -> None:
    docstring = ast.get_docstring(module.tree) or ""
    assert docstring.strip(), "no module docstring"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_functions_say_what_they_return(module: Module) -> None:
    assert not [f"{f.name} (line {f.lineno})" for f in functions(module) if f.returns is None]


@pytest.mark.parametrize("module", EVERYTHING, ids=str)
def test_nothing_is_left_for_later(module: Module) -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    assert not [f"line {n}" for n, line in enumerate(module.lines, 1) if any(mark in line for mark in marks)]
