"""The certificate of an API that speaks HTTPS, tried at the start: nobody could talk to a server without."""

from __future__ import annotations

import ssl
from pathlib import Path

from common.settings import Settings, SettingsError


def check_certificate(settings: Settings) -> None:
    """Raises `SettingsError`, saying what is wrong, when the certificate or its key cannot be used."""
    if not settings.ssl_certfile:
        return
    for flag, name in (("--ssl-certfile", settings.ssl_certfile), ("--ssl-keyfile", settings.ssl_keyfile)):
        try:
            Path(name).read_bytes()
        except OSError as error:
            raise SettingsError(f"{flag} {name} cannot be read: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, _refuse_password)
    except ssl.SSLError as error:
        reason = "they do not belong together" if error.reason == "KEY_VALUES_MISMATCH" else "not valid PEM"
        raise SettingsError(f"--ssl-certfile and --ssl-keyfile cannot be used: {reason}") from None


def _refuse_password() -> str:
    """OpenSSL's question for it would wait at a terminal that a server does not have."""
    raise SettingsError("--ssl-keyfile is encrypted, and there is nobody to ask for its password")
