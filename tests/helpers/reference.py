"""transformers' own Llama with the bundled model's weights, in float32: what we are measured against."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.text import BUNDLED
from workers.checkpoint import load_config, locate
from workers.engine.weights import open_weights


def reference_model() -> Any:
    """Ready to be asked."""
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = locate(BUNDLED)
    config = load_config(checkpoint)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=True,
        )
    )
    weights = open_weights(checkpoint, config, torch.float32)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    model.load_state_dict({name: weights.get(name, *shape) for name, shape in shapes.items()}, strict=False)
    return model.eval()
