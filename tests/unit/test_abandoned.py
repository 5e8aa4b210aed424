"""Folders of embedded servers whose owners were killed: whoever starts next clears them away."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.bus import embedded


def test_servers_that_start_together_do_not_trip_over_what_they_clear_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(20):
        for number in range(50):
            left = tmp_path / f"{embedded._DIR_PREFIX}{number}"
            left.mkdir()
            (left / "owner.lock").touch()
        with ThreadPoolExecutor(4) as pool:
            for cleared in [pool.submit(embedded._remove_abandoned) for _ in range(4)]:
                cleared.result()
        assert not list(tmp_path.iterdir())
