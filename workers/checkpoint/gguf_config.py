"""Reads a `ModelConfig` from a GGUF file: its metadata, and what only its tensor table tells."""

from __future__ import annotations

from typing import Any

import numpy as np

from workers.checkpoint.config import ModelConfig, RopeScaling, check_architecture
from workers.checkpoint.errors import CheckpointError
from workers.checkpoint.fields import Fields
from workers.checkpoint.gguf import GGMLType, GGUFFile

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
#: Tokens that end a chat turn; files made from base models often name only the end of text as eos.
_CHAT_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"})
_CONTROL_TOKEN = 3
#: Divisors of the rotary frequencies, stored as a tensor.
_ROPE_FACTORS = "rope_freqs.weight"


def read_config(file: GGUFFile) -> ModelConfig:
    """The config of the model in ``file``."""
    metadata = Fields(file.metadata, str(file.path))
    name = metadata.text("general.architecture")
    architecture = check_architecture(name)
    prefix = f"{name}."
    own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    shape = Fields(own, f"{file.path}: {name}")
    if shape.integer("expert_count", 0):
        raise CheckpointError(f"{file.path} is a mixture of experts, which is not supported")
    heads = shape.integer("attention.head_count")
    hidden = shape.integer("embedding_length")
    head_dim = shape.integer("attention.key_length", hidden // max(heads, 1))
    if shape.integer("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"{file.path} rotates only part of each head, which is not supported")
    tokenizer = Fields(file.metadata, str(file.path))
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_vocab_size(file),
        hidden_size=hidden,
        intermediate_size=shape.integer("feed_forward_length"),
        num_layers=shape.integer("block_count"),
        num_heads=heads,
        num_kv_heads=shape.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=shape.number("attention.layer_norm_rms_epsilon"),
        rope_theta=shape.number("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(file, shape),
        max_position_embeddings=shape.integer("context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        bos_id=bos if isinstance(bos, int) else None,
        eos_ids=frozenset().union(*(tokenizer.ids(f"tokenizer.ggml.{key}") for key in _END_KEYS))
        | _chat_ends(file.metadata),
    )


def _vocab_size(file: GGUFFile) -> int:
    # The embedding has the last word: metadata may leave the number out or differ by padding.
    info = file.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        raise CheckpointError(f"{file.path} has no token_embd.weight")
    return info.shape[0]


def _chat_ends(metadata: dict[str, Any]) -> frozenset[int]:
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not isinstance(types, list):
        return frozenset()
    return frozenset(
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL_TOKEN and token in _CHAT_ENDS
    )


def _rope_scaling(file: GGUFFile, shape: Fields) -> RopeScaling | None:
    info = file.tensors.get(_ROPE_FACTORS)
    if info is not None:
        if info.type is not GGMLType.F32:
            raise CheckpointError(f"{file.path}: {_ROPE_FACTORS} is {info.type.name}, not F32")
        return RopeScaling("factors", factors=tuple(file.data(_ROPE_FACTORS).view(np.float32).tolist()))
    kind = shape.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling("linear", shape.number("rope.scaling.factor"))
    raise CheckpointError(f"{file.path}: rope scaling {kind!r} is not supported (supported: none, linear)")
