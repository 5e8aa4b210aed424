"""What is said of certificates that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from api.tls import check_certificate
from common.settings import Settings, SettingsError
from tests.helpers.certificates import certificate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("certificates")
    certificate(folder)
    certificate(folder, "other")
    certificate(folder, "locked", "-passout", "pass:secret")
    (folder / "nonsense").write_text("no PEM")
    return folder


def test_one_that_can(folder: Path) -> None:
    check_certificate(Settings(ssl_certfile=f"{folder}/server.crt", ssl_keyfile=f"{folder}/server.key"))
    check_certificate(Settings())


@pytest.mark.parametrize(
    ("cert", "key", "says"),
    [
        ("server.crt", "none", "--ssl-keyfile .*none cannot be read: No such file or directory"),
        ("none", "server.key", "--ssl-certfile .*none cannot be read: No such file or directory"),
        ("", "server.key", "--ssl-certfile .* cannot be read: Is a directory"),
        ("server.crt", "other.key", "they do not belong together"),
        ("nonsense", "server.key", "not valid PEM"),
        ("server.crt", "nonsense", "not valid PEM"),
        ("locked.crt", "locked.key", "--ssl-keyfile is encrypted"),
    ],
)
def test_those_that_cannot(folder: Path, cert: str, key: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        check_certificate(Settings(ssl_certfile=f"{folder}/{cert}", ssl_keyfile=f"{folder}/{key}"))
