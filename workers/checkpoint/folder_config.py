"""Reads a `ModelConfig` from a folder of transformers: config, generation_config and tokenizer_config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workers.checkpoint import sampling_defaults
from workers.checkpoint.config import ModelConfig, RopeScaling, check_architecture
from workers.checkpoint.errors import CheckpointError
from workers.checkpoint.fields import Fields

#: Class names in config.json's ``architectures``, by what they are called here.
_CLASSES = {"LlamaForCausalLM": "llama"}


def read_config(path: Path) -> ModelConfig:
    """The config of the model in the folder ``path``."""
    config = Fields.from_json(path / "config.json")
    generation = _optional(path / sampling_defaults.FILE)
    heads = config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"{config.where}: hidden_act {activation!r} is not supported (supported: silu)")
    if config.values.get("quantization_config") is not None:
        raise CheckpointError(f"{config.where}: quantised weights in this format are not supported")
    bias = config.flag("attention_bias", default=False)
    rope, theta = _rope(config)
    return ModelConfig(
        architecture=_architecture(config),
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", hidden // max(heads, 1)),
        rms_norm_eps=config.number("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=rope,
        max_position_embeddings=config.integer("max_position_embeddings"),
        tie_word_embeddings=config.flag("tie_word_embeddings", default=False),
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=config.flag("mlp_bias", default=False),
        bos_id=next(iter(config.ids("bos_token_id")), None),
        eos_ids=config.ids("eos_token_id") | generation.ids("eos_token_id") | _tokenizer_eos(path),
        generation_defaults=sampling_defaults.of(generation),
    )


def _optional(path: Path) -> Fields:
    return Fields.from_json(path) if path.is_file() else Fields({}, str(path))


def _architecture(config: Fields) -> str:
    names: Any = config.values.get("architectures")
    if isinstance(names, list) and names:
        return check_architecture(_CLASSES.get(names[0], str(names[0])))
    return check_architecture(config.text("model_type"))


def _rope(config: Fields) -> tuple[RopeScaling | None, float]:
    # transformers 5 writes both into rope_parameters, version 4 has theta at the top beside rope_scaling.
    scaling = config.section("rope_parameters") or config.section("rope_scaling")
    theta = config.number("rope_theta", 10000.0)
    if scaling is None:
        return None, theta
    theta = scaling.number("rope_theta", theta)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "default":
        return None, theta
    if kind == "linear":
        return RopeScaling(kind, scaling.number("factor")), theta
    if kind == "llama3":
        return RopeScaling(
            kind,
            factor=scaling.number("factor"),
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
            original_max_position_embeddings=scaling.integer("original_max_position_embeddings"),
        ), theta
    raise CheckpointError(
        f"{scaling.where}: rope type {kind!r} is not supported (supported: default, linear, llama3)"
    )


def _tokenizer_eos(path: Path) -> frozenset[int]:
    """The id of the tokenizer's own end token, which configs of chat models often lack."""
    config = _optional(path / "tokenizer_config.json")
    token: Any = config.values.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str):
        return frozenset()
    added = config.section("added_tokens_decoder")
    for token_id, entry in added.values.items() if added else ():
        if token_id.isdecimal() and isinstance(entry, dict) and entry.get("content") == token:
            return frozenset({int(token_id)})
    return _id_in_tokenizer(_optional(path / "tokenizer.json"), token)


def _id_in_tokenizer(tokenizer: Fields, token: str) -> frozenset[int]:
    entries: Any = tokenizer.values.get("added_tokens")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("content") == token and isinstance(entry.get("id"), int):
            return frozenset({entry["id"]})
    model = tokenizer.section("model")
    vocabulary = model.values.get("vocab") if model else None
    token_id = vocabulary.get(token) if isinstance(vocabulary, dict) else None
    return frozenset({token_id}) if isinstance(token_id, int) else frozenset()
