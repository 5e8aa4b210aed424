"""Writes the bundled model as a folder in transformers' form, for peers that do not read GGUF."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from workers.checkpoint import load_config, locate
from workers.engine.weights import open_weights
from workers.text.source import load_source


def export(model: str, folder: Path) -> None:
    """Weights (bfloat16), config and tokenizer of ``model``, a Llama with tied embeddings, to ``folder``."""
    checkpoint = locate(model)
    config = load_config(checkpoint)
    heads = {"num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads}
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        **heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(described))
    weights = open_weights(checkpoint, config, torch.bfloat16)
    width, wide, inner = config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size
    narrow = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, width),
        "model.norm.weight": (width,),
    }
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (wide, width),
            f"{at}.self_attn.k_proj.weight": (narrow, width),
            f"{at}.self_attn.v_proj.weight": (narrow, width),
            f"{at}.self_attn.o_proj.weight": (width, wide),
            f"{at}.mlp.gate_proj.weight": (inner, width),
            f"{at}.mlp.up_proj.weight": (inner, width),
            f"{at}.mlp.down_proj.weight": (width, inner),
            f"{at}.input_layernorm.weight": (width,),
            f"{at}.post_attention_layernorm.weight": (width,),
        }
    tensors = {name: weights.get(name, *shape).contiguous() for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source = load_source(checkpoint)
    source.tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", **source.special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
