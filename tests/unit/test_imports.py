"""Who may know whom: import edges between the rooms, and what each process loads when it starts."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

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


@pytest.mark.parametrize("module", [m for m in MODULES if within(m.name, *TEXT_ROOMS)], ids=str)
def test_transformers_is_not_loaded_at_start(module: Module) -> None:
    assert not [line for name, line in imports(module, at_load=True) if within(name, "transformers")]


#: What common may import beside the standard library.
COMMON_MAY = ("common", "pydantic", "orjson", "redis")


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_edges(module: Module) -> None:
    wrong = [
        f"line {line}: {name} ({why})"
        for room, names, why in FORBIDDEN
        if within(module.name, room)
        for name, line in imports(module)
        if within(name, *names)
    ]
    assert not wrong


@pytest.mark.parametrize("module", [m for m in MODULES if within(m.name, "common")], ids=str)
def test_common_imports_little(module: Module) -> None:
    allowed = {*sys.stdlib_module_names, *COMMON_MAY}
    assert not [name for name, _ in imports(module) if name.partition(".")[0] not in allowed]


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_only_the_bus_imports_redis(module: Module) -> None:
    if not within(module.name, "common.bus"):
        assert not [line for name, line in imports(module) if within(name, "redis", "valkey", "hiredis")]


@pytest.mark.parametrize("package", ["workers.engine", "workers.text", "workers.checkpoint"])
def test_libraries_do_not_know_the_bus(package: str) -> None:
    for module in MODULES:
        if within(module.name, package):
            assert not [f"{module} line {n}" for name, n in imports(module) if within(name, "common.bus")]


def test_at_most_one_file_imports_flashinfer() -> None:
    knowing = {str(m) for m in MODULES for name, _ in imports(m) if within(name, "flashinfer")}
    assert len(knowing) <= 1, knowing


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_only_settings_reads_the_environment(module: Module) -> None:
    if module.name == "common.settings":
        return
    reads = [
        f"line {node.lineno}"
        for node in ast.walk(module.tree)
        if (isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv", "getenvb"})
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and _names(node) & {"environ", "getenv"})
    ]
    assert not reads


def _names(node: ast.ImportFrom) -> set[str]:
    return {alias.name for alias in node.names}


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_key_names_are_made_in_one_file(module: Module) -> None:
    if module.name in {"common.bus.keys", "common.settings"}:
        return
    documentation = _docstrings(module.tree)
    literals = [
        f"line {node.lineno}: {node.value!r}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node not in documentation
        and re.match(r"ms:|\{\d+\}:", node.value)
    ]
    assert not literals


def test_scripts_name_no_keys() -> None:
    for script in SCRIPTS:
        code = [line.partition("--")[0] for line in script.read_text().splitlines()]
        assert not [line for line in code if re.search(r"['\"]ms:", line)], script.name


def _docstrings(tree: ast.Module) -> set[ast.Constant]:
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
