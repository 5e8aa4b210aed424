"""Who may know whom: import edges between the rooms, and what each process loads when it starts."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest

from tests.helpers.source import ROOT, Module, imports, modules, within

MODULES = modules()
SCRIPTS = sorted((ROOT / "common" / "bus" / "scripts").glob("*.lua"))
ROLES = ("workers.tokenizer", "workers.scheduler", "workers.detokenizer")
#: Rooms of the processes that start without torch. transformers may convert a rare tokenizer later on.
TEXT_ROOMS = ("workers.text", "workers.checkpoint", "workers.tokenizer", "workers.detokenizer")

#: (modules, what they must never import, why)
FORBIDDEN = [
    ("common", ("api", "workers", "cli"), "common is below all rooms"),
    ("api", ("workers", "cli"), "the API reaches workers through Redis only"),
    ("workers", ("api", "cli"), "workers know nothing of HTTP"),
    ("workers.engine", ("workers.text", *ROLES), "the engine is usable alone"),
    ("workers.text", ("workers.engine", *ROLES), "text is a library of its own"),
    ("workers.checkpoint", ("workers.engine", "workers.text", *ROLES), "checkpoints are only read"),
    *((role, tuple(r for r in ROLES if r != role), "the three processes meet in Redis") for role in ROLES),
    ("workers", ("fastapi", "starlette", "uvicorn"), "HTTP is the API's"),
    ("common", ("torch", "transformers", "fastapi", "numpy"), "every process loads common"),
    ("api", ("torch", "transformers", "tokenizers"), "API processes stay small"),
    *((room, ("torch",), "its process starts without torch") for room in TEXT_ROOMS),
]


#: What common may import beside the standard library.
COMMON_MAY = {"common", "pydantic", "orjson", "redis", "hiredis"}


@dataclass(frozen=True)
class Edge:
    """One import."""

    module: Module
    name: str
    line: int

    def __str__(self) -> str:
        return f"{self.module} line {self.line} imports {self.name}"


EDGES = [Edge(module, name, line) for module in MODULES for name, line in imports(module)]


def test_rooms_import_only_what_they_may() -> None:
    assert not [
        f"{edge}: {why}"
        for room, names, why in FORBIDDEN
        for edge in EDGES
        if within(edge.module.name, room) and within(edge.name, *names)
    ]


def test_transformers_is_not_loaded_at_start() -> None:
    early = [
        (str(m), name) for m in MODULES for name, _ in imports(m, at_load=True) if within(m.name, *TEXT_ROOMS)
    ]
    assert not [edge for edge in early if within(edge[1], "transformers")]


def test_common_imports_little() -> None:
    allowed = COMMON_MAY | sys.stdlib_module_names
    mine = [edge for edge in EDGES if within(edge.module.name, "common")]
    assert not [str(edge) for edge in mine if edge.name.partition(".")[0] not in allowed]


def test_only_the_bus_imports_redis() -> None:
    others = [edge for edge in EDGES if not within(edge.module.name, "common.bus")]
    assert not [str(edge) for edge in others if within(edge.name, "redis", "valkey", "hiredis")]


def test_libraries_do_not_know_the_bus() -> None:
    libraries = ("workers.engine", "workers.text", "workers.checkpoint")
    mine = [edge for edge in EDGES if within(edge.module.name, *libraries)]
    assert not [str(edge) for edge in mine if within(edge.name, "common.bus")]


def test_at_most_one_file_imports_flashinfer() -> None:
    knowing = {str(edge.module) for edge in EDGES if within(edge.name, "flashinfer")}
    assert len(knowing) <= 1, knowing


def test_only_settings_reads_the_environment() -> None:
    names = {"environ", "environb", "getenv", "getenvb"}
    reads = [edge for edge in EDGES if edge.name in {f"os.{name}" for name in names}]
    assert not [str(edge) for edge in reads]
    assert not [
        f"{module} line {node.lineno}"
        for module in MODULES
        for node in ast.walk(module.tree)
        if module.name != "common.settings" and isinstance(node, ast.Attribute) and node.attr in names
    ]


def test_key_names_are_made_in_one_file() -> None:
    others = [module for module in MODULES if module.name not in {"common.bus.keys", "common.settings"}]
    assert not [
        f"{module} line {node.lineno}: {node.value!r}"
        for module in others
        for node in set(ast.walk(module.tree)) - _docstrings(module.tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.match(r"ms:|\{\d+\}:", node.value)
    ]


def test_scripts_name_no_keys() -> None:
    for script in SCRIPTS:
        code = [line.partition("--")[0] for line in script.read_text().splitlines()]
        assert not [line for line in code if re.search(r"['\"]ms:", line)], script.name


def _docstrings(tree: ast.Module) -> set[ast.expr]:
    """Every string that stands as a statement of its own: docstrings."""
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


@pytest.mark.parametrize(
    ("entry", "absent"),
    [
        ("api.server", ("torch", "transformers", "tokenizers", "numpy")),
        ("workers.tokenizer.main", ("torch", "transformers", "fastapi")),
        ("workers.detokenizer.main", ("torch", "transformers", "fastapi")),
        ("cli.serve", ("torch", "transformers", "fastapi", "tokenizers", "numpy")),
    ],
)
def test_processes_start_without(entry: str, absent: tuple[str, ...]) -> None:
    program = f"import sys, {entry}; print([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
