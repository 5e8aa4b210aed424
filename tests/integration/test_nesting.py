"""Bodies nested to hurt: a 400 at the latest where something could not take it, and never more than that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.api_process import ApiProcess, stage

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiProcess]:
    with stage(tmp_path_factory.mktemp("nesting")) as running:
        yield running.api
        assert "Traceback" not in running.api.log()


DEPTHS = (100, 250, 260, 1000, 1100, 100_000)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "body",
    [
        '{"model":"test-model","messages":[{"role":"user","content":"x"}],"ignored":%s}',
        '{"model":"test-model","messages":%s}',
        '{"model":"test-model","messages":[{"role":"user","content":%s}]}',
        '{"model":"test-model","messages":[{"role":"user","content":"x","extra":%s}]}',
        '{"model":"test-model","messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":%s}}',
        '{"model":"test-model","messages":[{"role":"user","content":"x"}],"metadata":{"a":%s}}',
        '{"model":"test-model","messages":[{"role":"user","content":"x"}],"stop":%s}',
        '{"model":"test-model","messages":[{"role":"user","content":"x"}],"logit_bias":{"1":%s}}',
        "%s",
    ],
)
def test_nesting_never_breaks_anything(api: ApiProcess, body: str, depth: int) -> None:
    for pair in (("[", "]"), ('{"a":', "}")):
        inner = pair[0] * depth + ("1" if pair[0] != "[" else "") + pair[1] * depth
        for headers in ({}, {"idempotency-key": f"nested-{hash(body)}-{depth}-{pair[0]}"}):
            got = api.post(CHAT, (body % inner).encode(), headers)
            assert got.status in (200, 400), got.body[:500]
            assert depth < 1100 or got.status == 400, got.body[:500]
            if got.status == 400:
                assert len(got.error["message"]) < 2000
