"""The kinds of Redis that contract tests run on."""

from __future__ import annotations

import pytest

#: For ``@pytest.mark.parametrize("redis_binary", BOTH, indirect=True)``.
BOTH = ["valkey", pytest.param("redis7", marks=pytest.mark.redis7)]
