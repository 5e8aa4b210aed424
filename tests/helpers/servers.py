"""The kinds of Redis that contract tests run on."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from common.bus.embedded import find_binary

#: For ``@pytest.mark.parametrize("redis_binary", BOTH, indirect=True)``.
BOTH = ["valkey", pytest.param("redis7", marks=pytest.mark.redis7)]


def binary_of(kind: str) -> Path:
    """The server program of one kind of `BOTH`; skips the test, saying why, where it is not there."""
    if kind != "redis7":
        return find_binary()
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("redis-server is not installed (apt-get install redis-server)")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True, timeout=10).stdout
    if not re.search(r"v=7\.", said):
        pytest.skip(f"redis-server is not version 7: {said.strip()}")
    return Path(found)
