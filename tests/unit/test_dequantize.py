"""Block formats against their formulas, one number at a time in plain Python, and rotary pairs put right."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from workers.checkpoint.gguf import BLOCKS, GGMLType
from workers.engine.weights.gguf import dequantize, unpermute


def half(raw: bytes) -> float:
    return float(struct.unpack("<e", raw)[0])


def reference(block: bytes, kind: GGMLType) -> list[float]:
    """The formats' definitions: d * q, d * (q - 8) and d * q + m, low nibbles first."""
    scale = half(block[:2])
    if kind is GGMLType.Q8_0:
        return [scale * q for q in struct.unpack("<32b", block[2:])]
    packed = block[4:] if kind is GGMLType.Q4_1 else block[2:]
    nibbles = [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]
    if kind is GGMLType.Q4_0:
        return [scale * (q - 8) for q in nibbles]
    return [scale * q + half(block[2:4]) for q in nibbles]


def blocks(kind: GGMLType, count: int) -> bytes:
    """Random blocks whose scales are sensible numbers."""
    random = np.random.default_rng(kind.value)
    raw = random.integers(0, 256, (count, BLOCKS[kind][1]), dtype=np.uint8)
    halves = 2 if kind is GGMLType.Q4_1 else 1
    raw[:, : 2 * halves] = random.normal(0, 0.1, (count, halves)).astype("<f2").view(np.uint8)
    return raw.tobytes()


def tensor_of(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


@pytest.mark.parametrize("kind", [GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q8_0])
def test_quantised_blocks(kind: GGMLType) -> None:
    raw = blocks(kind, 40)
    size = BLOCKS[kind][1]
    wanted = [number for at in range(40) for number in reference(raw[at * size : (at + 1) * size], kind)]
    got = dequantize(tensor_of(raw), kind, torch.float32)
    torch.testing.assert_close(got, torch.tensor(wanted), rtol=1e-6, atol=1e-7)
    assert torch.equal(dequantize(tensor_of(raw), kind, torch.bfloat16), got.bfloat16())


def test_a_block_worked_out_by_hand() -> None:
    raw = struct.pack("<ee", 0.5, -1.0) + bytes(range(0x10, 0x20))  # nibbles 0..15 low, all 1 high
    wanted = [0.5 * q - 1 for q in range(16)] + [-0.5] * 16
    assert dequantize(tensor_of(raw), GGMLType.Q4_1, torch.float32).tolist() == wanted


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (GGMLType.F32, np.array([1.5, -2, 0.1], "<f4").tobytes()),
        (GGMLType.F16, np.array([1.5, -2, 0.1], "<f2").tobytes()),
        (GGMLType.BF16, b"\xc0\x3f\x00\xc0\xcd\x3d"),
    ],
)
def test_plain_numbers(kind: GGMLType, raw: bytes) -> None:
    source = tensor_of(raw)
    got = dequantize(source, kind, torch.float32)
    assert got.tolist() == pytest.approx([1.5, -2, 0.1], rel=5e-3)
    source.zero_()
    assert got[0] == 1.5, "a weight must not stay a view of the file"


@pytest.mark.parametrize("shape", [(12, 5), (12,)])
def test_rotary_pairs_come_back_as_halves(shape: tuple[int, ...]) -> None:
    wanted = torch.arange(12 * (shape[1:] or (1,))[0]).view(shape)
    heads = wanted.view(2, 2, 3, *shape[1:])  # head, half, pair
    interleaved = torch.stack([heads[:, 0], heads[:, 1]], dim=2).reshape(shape)
    assert not torch.equal(interleaved, wanted)
    assert torch.equal(unpermute(interleaved, 2), wanted)
