"""Every shape of Llama against transformers: grouped heads, ties, biases, rope scalings, shards, GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.model import Driver, record, reference_logits, tiny_llama
from tests.unit import gguf_writer as w
from workers.checkpoint import CheckpointError, load_config, locate
from workers.engine.loader import build_runner

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    "odd eps": {"rms_norm_eps": 0.1},
}
PROMPTS = [[1, 5, 9, 33], [7] * 40, [3, 100, 2, 64, 0, 17, 88, 5, 6, 1, 2, 3, 4, 5, 6, 7, 8], [50]]


def build(path: Path, *, dtype: str = "float32") -> Any:
    checkpoint = locate(str(path))
    return build_runner(
        checkpoint,
        load_config(checkpoint),
        dtype=dtype,
        max_model_len=256,
        max_num_seqs=8,
        block_size=4,
        kv_cache_tokens=1024,
    )


def compare(reference: Any, runner: Any, *, new: int = 12) -> None:
    """Greedy tokens and logits of all prompts, batched on our side, alone on the other."""
    recorder = record(runner)
    driver = Driver(runner)
    requests = [driver.request(prompt, row=row) for row, prompt in enumerate(PROMPTS)]
    steps = [driver.step(requests) for _ in range(new)]
    assert not any(step.errors for step in steps)
    # The first step orders chunks by prompt, all later ones are decodes in the order of the rows.
    order = sorted(range(len(PROMPTS)), key=lambda at: len(PROMPTS[at]) > 1)
    for request in requests:
        wanted = reference_logits(reference, request.tokens[:-1], new)
        assert request.output == wanted.argmax(dim=-1).tolist()
        place = [order.index(request.row), *[request.row] * (new - 1)]
        got = torch.stack([scores[at] for scores, at in zip(recorder.scores, place, strict=True)])
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_greedy_tokens_equal_transformers(tmp_path: Path, shape: str) -> None:
    reference = tiny_llama(tmp_path, **SHAPES[shape])
    compare(reference, build(tmp_path))


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    reference = tiny_llama(tmp_path, shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    compare(reference, build(tmp_path))


def test_shards_without_an_index_are_found(tmp_path: Path) -> None:
    reference = tiny_llama(tmp_path, shard_size="60KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    compare(reference, build(tmp_path))


def test_half_precision_files_are_widened(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    tiny_llama(tmp_path).bfloat16().save_pretrained(tmp_path)
    compare(LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval(), build(tmp_path))


@pytest.mark.parametrize("shape", ["biases", "tied", "grouped"])
def test_bfloat16_stays_close_to_float32(tmp_path: Path, shape: str) -> None:
    reference = tiny_llama(tmp_path, initializer_range=0.1, **SHAPES[shape])
    runner = build(tmp_path, dtype="bfloat16")
    recorder = record(runner)
    driver = Driver(runner)
    for prompt in PROMPTS:
        driver.generate(driver.request(prompt), 1)
        wanted = reference_logits(reference, prompt, 1)
        cosine = torch.cosine_similarity(recorder.scores[-1], wanted)
        assert recorder.scores[-1].dtype is torch.float32
        assert float(cosine) > 0.999


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_tensors(reference: Any) -> dict[str, tuple[tuple[int, ...], int, bytes]]:
    """All weights in float32, rotary pairs interleaved as converters write them."""
    config = reference.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for name, stored in reference.state_dict().items():
        stem, _, kind = name.rpartition(".")
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        part = GGUF_NAMES[part if layer.isdecimal() else stem]
        tensor = stored
        if part in heads:
            rest = stored.shape[1:]
            tensor = stored.view(heads[part], 2, -1, *rest).transpose(1, 2).reshape(stored.shape)
        full = f"blk.{layer}.{part}.{kind}" if layer.isdecimal() else f"{part}.{kind}"
        tensors[full] = (tuple(tensor.shape), 0, tensor.contiguous().numpy().astype("<f4").tobytes())
    return tensors


def gguf_from(reference: Any, path: Path) -> Path:
    """The same model as a GGUF file."""
    config, tensors = reference.config, gguf_tensors(reference)
    metadata = {
        "general.architecture": (w.STRING, "llama"),
        "llama.block_count": (w.U32, config.num_hidden_layers),
        "llama.context_length": (w.U32, config.max_position_embeddings),
        "llama.embedding_length": (w.U32, config.hidden_size),
        "llama.feed_forward_length": (w.U32, config.intermediate_size),
        "llama.attention.head_count": (w.U32, config.num_attention_heads),
        "llama.attention.head_count_kv": (w.U32, config.num_key_value_heads),
        "llama.attention.layer_norm_rms_epsilon": (w.F32, config.rms_norm_eps),
        "llama.rope.freq_base": (w.F32, config.rope_parameters["rope_theta"]),
        "tokenizer.ggml.eos_token_id": (w.U32, 2),
    }
    if config.rope_parameters["rope_type"] == "llama3":
        base = 1 / config.rope_parameters["rope_theta"] ** (torch.arange(0, 16, 2) / 16)
        factors = base / reference.model.rotary_emb.inv_freq
        tensors["rope_freqs.weight"] = ((8,), 0, factors.numpy().astype("<f4").tobytes())
    return w.write(path, metadata, tensors)


@pytest.mark.parametrize("shape", ["grouped", "biases", "llama3 rope"])
def test_gguf_files_give_the_same_model(tmp_path: Path, shape: str) -> None:
    reference = tiny_llama(tmp_path, **SHAPES[shape])
    compare(reference, build(gguf_from(reference, tmp_path / "x.gguf")))


def damage(folder: Path, what: str) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.k_proj.weight"
    if what == "missing":
        del tensors[name]
    elif what == "shape":
        tensors[name] = tensors[name][:-1].clone()
    elif what == "dtype":
        tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, path)
    if what == "truncated":
        path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("missing", "no tensor model.layers.1.self_attn.k_proj.weight"),
        ("shape", r"has shape \(31, 64\), not \(32, 64\)"),
        ("dtype", "int8, which is not supported"),
        ("truncated", "cannot read"),
    ],
)
def test_damaged_weights_say_what_is_wrong(tmp_path: Path, what: str, says: str) -> None:
    tiny_llama(tmp_path)
    damage(tmp_path, what)
    with pytest.raises(CheckpointError, match=says):
        build(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no safetensors files"):
        build(tmp_path)


def test_progress_counts_the_layers(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    checkpoint = locate(str(tmp_path))
    seen: list[tuple[int, int]] = []
    build_runner(
        checkpoint,
        load_config(checkpoint),
        dtype="float32",
        max_model_len=64,
        max_num_seqs=1,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]
