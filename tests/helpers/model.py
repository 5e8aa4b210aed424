"""Small models, and a driver that steps a `ModelRunner` by hand: what an engine would plan, without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from common.sampling import SamplingParams
from workers.checkpoint import load_config, locate
from workers.engine.attention import AttentionBackend, Metadata
from workers.engine.config import EngineConfig
from workers.engine.core import NativeEngine
from workers.engine.loader import build_runner
from workers.engine.models import Model
from workers.engine.plan import Row, RowStart, StepPlan, StepResult
from workers.engine.runner import ModelRunner
from workers.engine.types import TokenLogprobs

GREEDY = SamplingParams(temperature=0)


def tiny_llama(folder: Path, *, shard_size: str = "1GB", seed: int = 0, **changes: Any) -> Any:
    """A random Llama of transformers, saved into ``folder``; returns it in float32, ready to be asked."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": 101,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.3,  # large enough that attention and positions matter
            "bos_token_id": 1,
            "eos_token_id": 2,
            **changes,
        }
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def engine_on(folder: Path, *, kv_tokens: int = 2048, rows: int = 8, budget: int = 64, **limits: Any) -> Any:
    """An engine on a small model, with blocks of 4 and contexts of 200 tokens."""
    checkpoint = locate(str(folder))
    config = load_config(checkpoint)
    runner = build_runner(
        checkpoint,
        config,
        dtype="float32",
        max_model_len=200,
        max_num_seqs=rows,
        block_size=4,
        kv_cache_tokens=kv_tokens,
    )
    made = EngineConfig(
        max_model_len=200,
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        block_size=4,
        verify_hits=True,
        **limits,
    )
    return NativeEngine(runner, config=made, eos_ids=(), model_id="tiny")


@torch.inference_mode()
def reference_logits(model: Any, tokens: Sequence[int], keep: int) -> torch.Tensor:
    """What transformers gives for the last ``keep`` positions of ``tokens``."""
    logits: torch.Tensor = model(torch.tensor([list(tokens)]), logits_to_keep=keep).logits[0].float()
    return logits


def assert_logprobs(
    reports: Sequence[TokenLogprobs | None], model: Any, tokens: Sequence[int], top: int
) -> None:
    """``reports``, of the last of ``tokens``, equal what transformers makes of all before each of them."""
    wanted = reference_logits(model, tokens[:-1], len(reports)).log_softmax(dim=-1)
    for report, row, token in zip(reports, wanted, tokens[len(tokens) - len(reports) :], strict=True):
        assert report is not None
        assert report.logprob == pytest.approx(float(row[token]), abs=1e-3)
        ids, values = [number for number, _ in report.top], [value for _, value in report.top]
        assert len(set(ids)) == top
        assert values == sorted(values, reverse=True)
        # Ids that are all but equal may be in another order; their numbers tell.
        assert values == pytest.approx(row[ids].tolist(), abs=1e-3)
        assert values == pytest.approx(row.topk(top).values.tolist(), abs=1e-3)


class Recorder:
    """A model that remembers the hidden states and logits it gave."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.hidden: list[torch.Tensor] = []
        self.scores: list[torch.Tensor] = []

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend[Metadata],
        metadata: Metadata,
    ) -> torch.Tensor:
        self.hidden.append(self.model.forward(tokens, positions, attention, metadata))
        return self.hidden[-1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.scores.append(self.model.logits(hidden))
        return self.scores[-1].clone()


def record(runner: ModelRunner[Any]) -> Recorder:
    """Listen to ``runner``'s model from now on."""
    while isinstance(runner._model, Recorder):
        runner._model = runner._model.model
    recorder = Recorder(runner._model)
    runner._model = recorder
    return recorder


@dataclass
class Request:
    """A generation under way: its row, its blocks, all its tokens, and how many of them are computed."""

    row: int
    blocks: list[int]
    tokens: list[int]
    prompt: int
    params: SamplingParams = GREEDY
    seed: int = 0
    computed: int = 0
    started: bool = False

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]


@dataclass
class Driver:
    """Steps requests through a runner. Blocks are handed out scattered, so that order cannot help."""

    runner: ModelRunner[Any]
    steps: int = 0
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = self.runner.num_blocks
        self.free = [(at * 7919) % count for at in range(count)] if count % 7919 else list(range(count))

    def request(
        self,
        prompt: Sequence[int],
        *,
        row: int = 0,
        length: int = 64,
        params: SamplingParams = GREEDY,
        seed: int = 0,
        shared: Sequence[int] = (),
    ) -> Request:
        """A request with room for ``length`` new tokens; ``shared`` blocks hold its prefix already."""
        size = self.runner.block_size
        count = -(-(len(prompt) + length) // size) - len(shared)
        blocks = [*shared, *(self.free.pop() for _ in range(count))]
        computed = len(shared) * size
        return Request(row, blocks, list(prompt), len(prompt), params, seed, computed)

    def release(self, *requests: Request) -> None:
        for request in requests:
            self.free.extend(request.blocks)

    def step(self, requests: Sequence[Request], chunk: int = 512) -> StepResult:
        """One step of all requests: a token where one is due, a chunk where more are."""
        self.steps += 1
        starts, decodes, chunks = [], [], []
        for request in requests:
            if not request.started:
                prompt = request.tokens[: request.prompt]
                starts.append(RowStart(request.row, prompt, request.output, request.params, request.seed))
                request.started = True
            tokens = request.tokens[request.computed : request.computed + chunk]
            sample = request.computed + len(tokens) == len(request.tokens)
            row = Row(request.row, tokens, request.computed, request.blocks, sample)
            (decodes if len(tokens) == 1 and sample else chunks).append((request, row))
        planned = decodes + chunks
        plan = StepPlan(self.steps, tuple(starts), tuple(row for _, row in planned), len(decodes))
        result = self.runner.collect(self.runner.launch(plan))
        for (request, row), token in zip(planned, result.tokens, strict=True):
            request.computed += len(row.tokens)
            if token is not None:
                request.tokens.append(token)
        return result

    def generate(self, request: Request, count: int, *, chunk: int = 512) -> list[int]:
        """Step one request alone until it has ``count`` tokens, its blocks given back after."""
        while len(request.output) < count:
            result = self.step([request], chunk)
            assert not result.errors
        self.release(request)
        return request.output
