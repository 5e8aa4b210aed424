"""The engine's limits, validated once. Knows nothing of models, devices or where settings come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How much an engine takes on at once. An impossible combination raises ValueError."""

    max_model_len: int  #: most tokens of one request, prompt and output together
    max_num_seqs: int  #: rows: requests computed in one step
    max_num_batched_tokens: int  #: most tokens computed in one step
    block_size: int = 16
    enable_prefix_caching: bool = True
    #: Steps launched before the one in front of them is collected: 0 or 1.
    overlap: int = 0
    #: Share of its max_tokens a request is expected to use, when the engine has been idle (`admission.py`).
    new_token_ratio: float = 0.7
    #: Compare the tokens of every prefix hit; for tests.
    verify_hits: bool = False

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            # Every running request gets its token in every step (E1), with no turns to take.
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must not be below "
                f"max_num_seqs ({self.max_num_seqs})"
            )
        if self.overlap not in (0, 1):
            raise ValueError("overlap must be 0 or 1")
        if not 0 < self.new_token_ratio <= 1:
            raise ValueError("new_token_ratio must be above 0 and at most 1")
