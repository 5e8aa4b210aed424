"""The engine and a real model together: every schedule of the same requests gives the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.sampling import SamplingParams
from tests.helpers.model import engine_on, reference_logits, tiny_llama
from workers.engine.types import EngineRequest, Finish, Output

VOCAB = 101


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    tiny_llama(path)
    return path


def requests() -> list[EngineRequest]:
    """Shared prefixes, different lengths, greedy and not, with penalties and a minimum length."""
    kinds = [
        SamplingParams(temperature=0, max_tokens=20),
        SamplingParams(temperature=0.7, max_tokens=25),
        SamplingParams(top_p=0.9, max_tokens=15),
        SamplingParams(top_k=10, repetition_penalty=1.3, frequency_penalty=0.3, max_tokens=30),
        SamplingParams(temperature=0, max_tokens=12, min_tokens=12, stop_token_ids=tuple(range(50))),
    ]
    prefix = [(at * 37) % VOCAB for at in range(30)]
    return [
        EngineRequest(f"r{at}", [*prefix[: 5 * (at % 7)], at, 3 * at + 1], kinds[at % len(kinds)], seed=at)
        for at in range(16)
    ]


def run(engine: Any, asked: list[EngineRequest]) -> dict[str, list[int | None]]:
    for request in asked:
        engine.add(request)
    outputs: list[Output] = []
    while engine.has_work():
        outputs += engine.step()
        engine.check()
    streams: dict[str, list[int | None]] = {request.key: [] for request in asked}
    for output in outputs:
        assert output.finish in (None, Finish.LENGTH, Finish.STOP), output
        assert output.index == len(streams[output.key])
        streams[output.key].append(output.token)
    return streams


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[int | None]]:
    engine = engine_on(folder, enable_prefix_caching=False)
    streams: dict[str, list[int | None]] = {}
    for request in requests():
        streams |= run(engine, [request])
    return streams


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"overlap": 1},
        {"budget": 9},
        {"kv_tokens": 120, "new_token_ratio": 0.01},
        {"kv_tokens": 120, "new_token_ratio": 0.01, "overlap": 1, "budget": 16},
        {"rows": 3},
    ],
    ids=str,
)
def test_every_schedule_gives_the_same_streams(
    folder: Path, alone: dict[str, list[int | None]], limits: dict[str, Any]
) -> None:
    engine = engine_on(folder, **limits)
    assert run(engine, requests()) == alone
    stats = engine.stats()
    assert stats.kv_blocks_used == 0
    if "new_token_ratio" in limits:
        assert stats.preemptions > 0
    assert stats.prefix_hits > 0


def test_a_second_owner_goes_on_where_the_first_stopped(
    folder: Path, alone: dict[str, list[int | None]]
) -> None:
    engine = engine_on(folder)
    for request in requests():
        whole = [token for token in alone[request.key] if token is not None]
        engine.add(
            EngineRequest(request.key, request.prompt_ids, request.params, request.seed, output_ids=whole[:4])
        )
        tokens = []
        while engine.has_work():
            tokens += [output.token for output in engine.step()]
        assert [*whole[:4], *tokens] == whole


def test_the_greedy_stream_is_transformers_own(folder: Path, alone: dict[str, list[int | None]]) -> None:
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for request in requests()[::5]:
        tokens = [token for token in alone[request.key] if token is not None]
        wanted = reference_logits(reference, [*request.prompt_ids, *tokens[:-1]], len(tokens))
        assert tokens == wanted.argmax(dim=-1).tolist()


def test_a_request_whose_numbers_break_fails_alone(
    folder: Path, tmp_path: Path, alone: dict[str, list[int | None]]
) -> None:
    """One poisoned embedding: whoever asks with it gets an error, its neighbours their answer."""
    from transformers import LlamaForCausalLM

    poisoned = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    poisoned.model.embed_tokens.weight.data[77] = float("nan")
    poisoned.save_pretrained(tmp_path)
    engine = engine_on(tmp_path)
    asked = [request for request in requests() if 77 not in alone[request.key]]
    asked = [request for request in asked if 77 not in request.prompt_ids]
    assert len(asked) > 3
    engine.add(EngineRequest("bad", [5, 77, 9], SamplingParams(max_tokens=5), seed=1))
    for request in asked:
        engine.add(request)
    outputs: list[Output] = []
    while engine.has_work():
        outputs += engine.step()
    bad = [output for output in outputs if output.key == "bad"]
    assert [(output.token, output.finish) for output in bad] == [(None, Finish.ERROR)]
    assert "not finite" in bad[0].error
    for request in asked:
        assert [output.token for output in outputs if output.key == request.key] == alone[request.key]
    # The blocks it leaves behind are harmless to who gets them next.
    assert run(engine, asked) == {request.key: alone[request.key] for request in asked}
