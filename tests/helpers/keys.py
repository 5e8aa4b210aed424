"""API keys for tests: made and taken away with the command, used in headers."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from tests.helpers.stack import ROOT, clean_environment, millstream


def keys_command(redis_url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`millstream keys ...` on a Redis, to its end."""
    return subprocess.run(
        millstream("keys", *arguments, "--redis-url", redis_url),
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def make_key(redis_url: str, *options: str) -> tuple[str, str]:
    """A new key: its id and its secret."""
    done = keys_command(redis_url, "create", *options)
    assert done.returncode == 0, done.stderr
    return done.stderr.split()[0], done.stdout.strip()


def bearer(secret: str) -> Mapping[str, str]:
    return {"authorization": f"Bearer {secret}"}
