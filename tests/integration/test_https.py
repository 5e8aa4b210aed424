"""HTTPS: the whole server speaks it, its supervisor included, or says at the start why it cannot."""

from __future__ import annotations

import http.client
import json
import ssl
import subprocess
from pathlib import Path

import pytest

from tests.helpers.certificates import certificate
from tests.helpers.stack import ROOT, Stack, clean_environment, millstream
from tests.helpers.waiting import until

BODY = {"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
CHAT = "/v1/chat/completions"


def test_a_whole_server(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    flags = (
        "--engine",
        "null",
        "--null-step-ms",
        "0",
        "--ssl-certfile",
        str(cert),
        "--ssl-keyfile",
        str(key),
    )
    stack = Stack(*flags).start(wait=False)
    try:
        until(lambda: "Millstream serves" in stack.logs(), "it says where it listens", 60)
        assert f"curl -N https://127.0.0.1:{stack.port}/v1/chat/completions" in stack.logs()
        context = ssl.create_default_context(cafile=str(cert))
        connection = http.client.HTTPSConnection("127.0.0.1", stack.port, timeout=30, context=context)
        for stream in (False, True):
            body = json.dumps(BODY | {"stream": stream})
            connection.request("POST", CHAT, body, {"content-type": "application/json"})
            got = connection.getresponse()
            assert got.status == 200
            assert got.read().count(b'"finish_reason":"length"') == 1
        connection.close()
        plain = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=30)
        plain.request("GET", "/health")
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            plain.getresponse()
        plain.close()
        assert stack.stop() == 0
        assert "Traceback" not in stack.logs()
    finally:
        stack.discard()


@pytest.mark.parametrize("command", ["api", "serve"])
def test_a_certificate_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path, command: str) -> None:
    cert, _ = certificate(tmp_path)
    _, key = certificate(tmp_path, "other")
    flags = ["--engine", "null", "--port", "0", "--ssl-certfile", str(cert), "--ssl-keyfile", str(key)]
    done = subprocess.run(
        millstream(command, *flags),
        cwd=ROOT,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "they do not belong together" in done.stderr
    assert "Traceback" not in done.stderr
