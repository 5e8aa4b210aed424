"""The Llama architecture: pre-norm blocks of grouped-query attention with rotary positions, gated MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from workers.checkpoint import ModelConfig
from workers.engine.attention import AttentionBackend, Metadata
from workers.engine.layers.linear import Head, Linear, fused
from workers.engine.layers.norm import RMSNorm
from workers.engine.layers.rotary import Rotary
from workers.engine.weights import Weights


class Llama:
    """See `models.Model`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        max_positions: int,
        dtype: torch.dtype,
        progress: Callable[[int, int], None],
    ) -> None:
        vocabulary = (config.vocab_size, config.hidden_size)
        self._embedding = weights.get("model.embed_tokens.weight", *vocabulary)
        self._layers = []
        for index in range(config.num_layers):
            self._layers.append(Layer(index, config, weights))
            progress(index + 1, config.num_layers)
        self._norm = RMSNorm(weights.get("model.norm.weight", config.hidden_size), config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self._head = Head(self._embedding if tied else weights.get("lm_head.weight", *vocabulary))
        self._rotary = Rotary(config, max_positions=max_positions, dtype=dtype)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend[Metadata],
        metadata: Metadata,
    ) -> torch.Tensor:
        """See `models.Model.forward`."""
        # What runs between the layers is float32 in every dtype: rounding it at each of the additions
        # would cost bfloat16 half of its accuracy, and it is the smallest of the tensors.
        hidden = functional.embedding(tokens, self._embedding).float()
        angles = self._rotary.angles(positions)
        for layer in self._layers:
            hidden = layer.forward(hidden, self._rotary, angles, attention, metadata)
        return self._norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `models.Model.logits`."""
        return self._head(hidden)


class Layer:
    """One block: attention and MLP, each behind a norm and around a residual."""

    def __init__(self, index: int, config: ModelConfig, weights: Weights) -> None:
        self._index = index
        self._heads = config.num_heads
        self._kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._intermediate = config.intermediate_size
        hidden, inner = config.hidden_size, config.intermediate_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        load = _Loader(f"model.layers.{index}", weights)
        self._attention_norm = RMSNorm(load.norm("input_layernorm", hidden), config.rms_norm_eps)
        self._qkv = load.linear(
            {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv},
            hidden,
            bias=config.attention_bias,
        )
        self._o = load.linear({"self_attn.o_proj": hidden}, q, bias=config.attention_output_bias)
        self._mlp_norm = RMSNorm(load.norm("post_attention_layernorm", hidden), config.rms_norm_eps)
        self._gate_up = load.linear(
            {"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, bias=config.mlp_bias
        )
        self._down = load.linear({"mlp.down_proj": hidden}, inner, bias=config.mlp_bias)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: Rotary,
        angles: tuple[torch.Tensor, torch.Tensor],
        attention: AttentionBackend[Metadata],
        metadata: Metadata,
    ) -> torch.Tensor:
        """The block's output for ``hidden`` [tokens, hidden]; changes nothing in place."""
        heads = self._qkv(self._attention_norm(hidden)).view(len(hidden), -1, self._head_dim)
        rotated = rotary.rotate(heads[:, : self._heads + self._kv_heads], angles)  # q and k in one go
        attended = attention.forward(
            self._index,
            rotated[:, : self._heads],
            rotated[:, self._heads :],
            heads[:, self._heads + self._kv_heads :],
            metadata,
        )
        hidden = hidden + self._o(attended)
        gate_up = self._gate_up(self._mlp_norm(hidden))
        gate, up = gate_up[:, : self._intermediate], gate_up[:, self._intermediate :]
        return hidden + self._down(functional.silu(gate).mul_(up))


class _Loader:
    """Reads one layer's tensors and fuses those that share an input."""

    def __init__(self, prefix: str, weights: Weights) -> None:
        self._prefix = prefix
        self._weights = weights

    def norm(self, name: str, size: int) -> torch.Tensor:
        return self._weights.get(f"{self._prefix}.{name}.weight", size)

    def linear(self, outputs: dict[str, int], inputs: int, *, bias: bool) -> Linear:
        prefix, get = self._prefix, self._weights.get
        weights = [get(f"{prefix}.{name}.weight", size, inputs) for name, size in outputs.items()]
        biases = [get(f"{prefix}.{name}.bias", size) for name, size in outputs.items() if bias]
        return fused(weights, biases)
