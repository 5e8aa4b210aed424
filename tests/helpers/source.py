"""The product's source, parsed: what the structural tests look at."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("api", "cli", "common", "workers")


@dataclass(frozen=True)
class Module:
    """One source file."""

    path: Path
    tree: ast.Module
    lines: list[str]

    @property
    def name(self) -> str:
        """Dotted name, without `__init__`."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))


def modules(*folders: str) -> list[Module]:
    """Every Python file under ``folders``, the product's rooms by default."""
    paths = sorted(path for folder in folders or ROOMS for path in (ROOT / folder).rglob("*.py"))
    assert paths, f"no source under {folders or ROOMS}"
    return [Module(path, ast.parse(text := path.read_text()), text.splitlines()) for path in paths]


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a module, nested ones included."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def imports(module: Module, *, at_load: bool = False) -> Iterator[tuple[str, int]]:
    """Every module name imported in ``module``, with its line; `from a import b` gives a and a.b.

    With ``at_load``, only what is imported when the module is, not what its functions import later.
    """
    for node in _nodes_at_load(module.tree) if at_load else ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def _nodes_at_load(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _nodes_at_load(child)


def within(name: str, *packages: str) -> bool:
    """Whether dotted ``name`` is one of ``packages`` or inside one."""
    return any(name == package or name.startswith(package + ".") for package in packages)
