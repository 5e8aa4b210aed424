"""HTTPS: the whole server speaks it, its supervisor included, or says at the start why it cannot."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from tests.helpers.certificates import certificate
from tests.helpers.stack import ROOT, Stack, clean_environment, millstream
from tests.helpers.waiting import until

BODY = {"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
CHAT = "/v1/chat/completions"


def start(cert: Path, key: Path, *flags: str) -> Stack:
    engine = ("--engine", "null", "--null-step-ms", "0")
    return Stack(*engine, "--ssl-certfile", str(cert), "--ssl-keyfile", str(key), *flags).start(wait=False)


def test_a_whole_server(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    stack = start(cert, key)
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


def test_a_slow_reader_is_cut_off_without_an_error(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    stack = start(cert, key, "--slow-reader-timeout", "0.5")
    try:
        until(lambda: "Millstream serves" in stack.logs(), "it says where it listens", 60)
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.connect(("127.0.0.1", stack.port))
        context = ssl.create_default_context(cafile=str(cert))
        body = json.dumps(BODY | {"stream": True, "max_tokens": 4000, "ignore_eos": True, "n": 4}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
            connection.sendall(head + body)
            until(lambda: "a reader stayed behind and was cut off" in stack.logs(), "it is cut off", 60)
        assert stack.stop() == 0
        assert " ERROR " not in stack.logs()
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
