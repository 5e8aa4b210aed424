"""How large the KV cache becomes, and a clear refusal instead of a crash in the middle of serving."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from workers.checkpoint import load_config, locate
from workers.engine import memory

CONFIG = load_config(locate("smollm2-135m-instruct"))
GIB = 1 << 30
KV = 30 * 2 * 3 * 64 * 2


def blocks(**changes: Any) -> int:
    given: dict[str, Any] = {
        "itemsize": 2,
        "block_size": 16,
        "wanted": None,
        "useful": 1 << 30,
        "available": 16 * GIB,
    }
    return memory.kv_blocks(CONFIG, **(given | changes))


def test_weights_are_counted_to_a_thousandth() -> None:
    assert memory.weight_bytes(CONFIG, 4) == pytest.approx(4 * 134.5e6, rel=1e-3)
    # bfloat16 keeps the tied head a second time.
    untied = replace(CONFIG, tie_word_embeddings=False)
    assert (
        memory.weight_bytes(CONFIG, 2) == memory.weight_bytes(untied, 2) == memory.weight_bytes(untied, 4) / 2
    )
    assert memory.kv_bytes_per_token(CONFIG, 2) == KV


def test_the_default_is_what_is_useful_within_bounds() -> None:
    assert blocks(useful=1000) == 63
    assert blocks() == -(-memory.KV_LIMIT // KV // 16)
    small = blocks(available=2 * GIB)
    assert 0.4 * GIB < small * 16 * KV < 0.65 * GIB


def test_what_is_asked_for_is_given_or_refused() -> None:
    assert blocks(wanted=100) == 7
    assert blocks(wanted=400_000) == 25_000
    with pytest.raises(
        memory.EngineMemoryError, match=r"0\.30 GiB for the weights.*21\.97 GiB.*1024000 tokens"
    ):
        blocks(wanted=1_024_000)
    with pytest.raises(memory.EngineMemoryError, match=r"0\.50 GiB are free"):
        blocks(available=GIB // 2)


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_what_is_available_is_the_systems_or_the_groups(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo="MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    assert memory.available_bytes(tmp_path) == 2 << 20
    group = "sys__fs__cgroup__a__b__memory_dot_"
    write(tmp_path, proc__self__cgroup="0::/a/b\n", **{f"{group}max": "max\n", f"{group}current": "5\n"})
    assert memory.available_bytes(tmp_path) == 2 << 20
    stat = "anon 1\ninactive_file 300\nactive_file 7\n"
    write(tmp_path, **{f"{group}max": "1000\n", f"{group}current": "800\n", f"{group}stat": stat})
    assert memory.available_bytes(tmp_path) == 500


def test_a_container_sees_its_limit_at_the_root_of_its_groups(tmp_path: Path) -> None:
    write(tmp_path, proc__self__cgroup="0::/\n", proc__meminfo="MemAvailable: 900000 kB\n")
    write(tmp_path, sys__fs__cgroup__memory_dot_max="5000", sys__fs__cgroup__memory_dot_current="1000")
    assert memory.available_bytes(tmp_path) == 4000


def test_this_machine_has_memory() -> None:
    assert memory.available_bytes() > GIB // 4


def test_a_system_that_says_nothing_is_taken_at_its_size(tmp_path: Path) -> None:
    assert memory.available_bytes(tmp_path) > GIB // 4
