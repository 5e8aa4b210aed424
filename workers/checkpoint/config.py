"""What a model is, apart from its weights: shape, positions, end ids, sampling defaults.

One `ModelConfig` for every storage format, so that nothing past this library knows where a model came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from workers.checkpoint.errors import CheckpointError

#: Architectures the engine has a model for.
SUPPORTED = ("llama",)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched past the trained context.

    ``kind`` is ``linear`` (every frequency divided by ``factor``), ``llama3`` (low frequencies divided, high
    ones kept, a smooth step between) or ``factors`` (each frequency divided by its own factor, which is how
    GGUF files store llama3).
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer, in the words of transformers' config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool  #: of the q, k and v projections
    attention_output_bias: bool
    mlp_bias: bool
    bos_id: int | None
    #: Every id that ends a generation: the tokenizer's, config's and generation_config's together.
    eos_ids: frozenset[int]
    #: Sampling defaults the model's authors recommend, by the names of `SamplingParams`.
    generation_defaults: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise CheckpointError(f"the model's {name} is {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"the model's {self.num_heads} heads do not split over {self.num_kv_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"the model's head_dim {self.head_dim} is odd, rotary positions need pairs")


def check_architecture(name: str) -> str:
    """The architecture, or an error that names the supported ones."""
    if name not in SUPPORTED:
        raise CheckpointError(f"architecture {name!r} is not supported (supported: {', '.join(SUPPORTED)})")
    return name
