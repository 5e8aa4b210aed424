"""Weights from a GGUF file: blocks of quantised numbers become plain tensors as they are read.

The formulas are the GGML block formats; a block is 32 consecutive elements of a row, its scale a float16.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from workers.checkpoint import CheckpointError, GGUFFile, ModelConfig
from workers.checkpoint.gguf import BLOCKS, GGMLType

#: GGUF's names of what transformers calls model.layers.N.<name>.
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


class GGUFWeights:
    """See `Weights`."""

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype) -> None:
        self._file = GGUFFile(path)
        self._dtype = dtype
        # Llama files store rotary pairs next to each other; transformers keeps them half a head apart.
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        self._permuted = heads if config.architecture == "llama" else {}

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """See `Weights.get`."""
        stored, part = _stored_name(name)
        info = self._file.tensors.get(stored)
        if info is None:
            raise CheckpointError(f"{self._file.path} has no tensor {stored}")
        if info.shape != shape:
            raise CheckpointError(f"{stored} in {self._file.path} has shape {info.shape}, not {shape}")
        tensor = dequantize(torch.from_numpy(self._file.data(stored)), info.type, self._dtype).view(shape)
        heads = self._permuted.get(part)
        return unpermute(tensor, heads) if heads else tensor


def _stored_name(name: str) -> tuple[str, str]:
    """A tensor's name in the file, and which part of a layer it is (empty outside of layers)."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return _OTHER_NAMES.get(name, name), ""
    layer, part, suffix = match.groups()
    part = _LAYER_NAMES.get(part, part)
    return f"blk.{layer}.{part}.{suffix}", part


def unpermute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from interleaved rotary pairs (0, 1), (2, 3)... to halves."""
    rest = tensor.shape[1:]
    return tensor.view(heads, -1, 2, *rest).transpose(1, 2).reshape(tensor.shape)


def dequantize(raw: torch.Tensor, kind: GGMLType, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of a tensor's raw bytes, flat. Computed in float32, then rounded once to ``dtype``."""
    if kind is GGMLType.F32:
        return raw.view(torch.float32).to(dtype, copy=True)
    if kind is GGMLType.F16:
        return raw.view(torch.float16).to(dtype, copy=True)
    if kind is GGMLType.BF16:
        return raw.view(torch.bfloat16).to(dtype, copy=True)
    blocks = raw.view(-1, BLOCKS[kind][1])
    scale = _half(blocks, 0)
    if kind is GGMLType.Q8_0:
        values = blocks[:, 2:].view(torch.int8).float().mul_(scale)
    elif kind is GGMLType.Q4_0:
        values = _nibbles(blocks[:, 2:]).sub_(8).mul_(scale)
    else:
        values = _nibbles(blocks[:, 4:]).mul_(scale).add_(_half(blocks, 2))
    return values.to(dtype).flatten()


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """16 bytes to 32 numbers: the low halves are elements 0 to 15, the high halves 16 to 31."""
    packed = packed.contiguous()
    numbers = torch.empty(len(packed), 2, 16)
    numbers[:, 0] = packed & 15
    numbers[:, 1] = packed >> 4
    return numbers.view(-1, 32)
