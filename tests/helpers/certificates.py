"""Certificates that nobody else has signed, made when they are needed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def certificate(folder: Path, name: str = "server", *options: str) -> tuple[Path, Path]:
    """A certificate for localhost that nobody else has signed, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    if not options:
        options = ("-nodes",)
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", *options),
        ],
        check=True,
        capture_output=True,
        timeout=30,
    )
    return cert, key
