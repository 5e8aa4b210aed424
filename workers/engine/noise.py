"""The noise of sampling: a pure function of (seed, position, vocabulary id), with no state (E6).

The Gumbel-max trick draws from a softmax by taking the argmax of logits plus Gumbel noise. Because the noise
belongs to ids and not to ranks or batch rows, a token depends on nothing but its own row's logits, and only
ids that can still win need their noise. What is computed here is a definition: replicas and devices must
agree on it to the bit.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

Bits: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]
Floats: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Key: TypeAlias = tuple[np.uint32, np.uint32]

_MASK = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15
_ID_STEP = np.uint32(0x9E3779B1)
_MIX_1, _MIX_2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
_S16, _S13 = np.uint32(16), np.uint32(13)


def _mix64(value: int) -> int:
    """A bijection of 64 bits in which every input bit moves half of the output bits."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def key(seed: int, position: int) -> Key:
    """The key of one draw. ``seed`` is any 64-bit number, ``position`` the token's absolute position."""
    mixed = _mix64((_mix64((seed + _WEYL) & _MASK) + position * _WEYL) & _MASK)
    return np.uint32(mixed & 0xFFFFFFFF), np.uint32(mixed >> 32)


def spread(ids: np.ndarray[tuple[int, ...], np.dtype[np.integer]]) -> Bits:
    """Ids spread over 32 bits: the part of `bits` that no draw changes."""
    return ids.astype(np.uint32) * _ID_STEP


def bits(draw: Key, spread_ids: Bits) -> Bits:
    """32 random bits per id."""
    low, high = draw
    mixed = spread_ids + low
    mixed ^= mixed >> _S16
    mixed *= _MIX_1
    mixed ^= high
    mixed ^= mixed >> _S13
    mixed *= _MIX_2
    mixed ^= mixed >> _S16
    return mixed


def gumbel(random: Bits) -> Floats:
    """Gumbel noise from random bits. It grows with them, from -3.2 to 22.9."""
    uniform = (random.astype(np.float64) + 0.5) * 2.0**-32
    noise: Floats = -np.log(-np.log(uniform))
    return noise
