"""Engines over the fake runner, and what comes out of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from common.sampling import SamplingParams
from tests.helpers.fake_runner import FakeRunner, Fault, no_fault
from workers.engine.config import EngineConfig
from workers.engine.core import NativeEngine
from workers.engine.types import Engine, EngineRequest, Finish, Output, TokenLogprobs


def build(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    eos: Sequence[int] = (),
    fault: Fault = no_fault,
    **config: Any,
) -> tuple[NativeEngine, FakeRunner]:
    """An engine with generous limits where none are given."""
    limits: dict[str, Any] = {
        "max_model_len": 200,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "verify_hits": True,
    }
    made = EngineConfig(block_size=block_size, **(limits | config))
    runner = FakeRunner(
        num_blocks, block_size, overlap=made.overlap, budget=made.max_num_batched_tokens, fault=fault
    )
    return NativeEngine(runner, config=made, eos_ids=eos, model_id="fake"), runner


def ask(key: str, prompt: Sequence[int], max_tokens: int | None = 5, **more: Any) -> EngineRequest:
    """A request; keywords are fields of the request or of its sampling parameters."""
    names = EngineRequest.__dataclass_fields__.keys()
    fields = {name: value for name, value in more.items() if name in names}
    params = {name: value for name, value in more.items() if name not in names}
    fields.setdefault("seed", 0)
    return EngineRequest(key, prompt, SamplingParams(max_tokens=max_tokens, **params), **fields)


def drain(engine: Engine, *, steps: int = 2000) -> dict[str, list[Output]]:
    """Run until there is no work; every invariant is proved after every step."""
    outputs: dict[str, list[Output]] = {}
    while engine.has_work():
        for output in engine.step():
            outputs.setdefault(output.key, []).append(output)
        engine.check()
        steps -= 1
        assert steps, "the engine never comes to rest"
    return outputs


def tokens(outputs: Iterable[Output]) -> list[int]:
    return [output.token for output in outputs if output.token is not None]


def finish(outputs: Sequence[Output]) -> Finish | None:
    """How a request ended; it must have done so once, last."""
    assert not any(output.finish for output in outputs[:-1])
    return outputs[-1].finish


def prompt_logprobs(outputs: Iterable[Output]) -> list[TokenLogprobs]:
    """What came for the prompt: stretch after stretch, from position 1 on, before any token."""
    got: list[TokenLogprobs] = []
    generated = False
    for output in outputs:
        generated = generated or output.token is not None
        if output.prompt is not None:
            assert (output.index, output.token, output.finish, output.logprobs) == (0, None, None, None)
            assert not generated, "the prompt comes first"
            assert output.prompt.start == len(got) + 1
            assert output.prompt.tokens
            got += output.prompt.tokens
    return got


def logprobs(outputs: Iterable[Output]) -> list[TokenLogprobs | None]:
    """What came with each token."""
    return [output.logprobs for output in outputs if output.token is not None]
