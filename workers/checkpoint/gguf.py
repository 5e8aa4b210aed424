"""Reads GGUF containers (v2 and v3, little endian) through a memory map: metadata, tensor table, bytes.

Knows the container only: what the numbers mean for a model is `config`, how blocks turn into weights is
the engine's. Every length in the file is checked against the bytes that are there before it is used.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from workers.checkpoint.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
#: The format has four dimensions at most, and nests arrays never more than a level or two in practice.
MAX_DIMENSIONS = 4
MAX_NESTING = 4


class GGMLType(IntEnum):
    """Element types of tensors that this project reads; files may hold others."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q8_0 = 8
    BF16 = 30


#: Elements and bytes of one block.
BLOCKS: dict[GGMLType, tuple[int, int]] = {
    GGMLType.F32: (1, 4),
    GGMLType.F16: (1, 2),
    GGMLType.BF16: (1, 2),
    GGMLType.Q4_0: (32, 18),
    GGMLType.Q4_1: (32, 20),
    GGMLType.Q8_0: (32, 34),
}

_STRING, _ARRAY, _BOOL = 8, 9, 7
#: Little-endian numpy types of the scalar metadata types.
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file. ``shape`` is in row-major order (the file stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int  #: from the start of the file
    nbytes: int


class GGUFFile:
    """An open GGUF file.

    The mapping lives as long as the object or any array from `data`. It is private and writable so that
    torch takes its arrays as they are; nobody writes to them, so its pages stay the shared page cache.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"cannot read {self.path}: {error}") from error
        cursor = _Cursor(self._map, self.path)
        if self._map[:4] != MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file")
        cursor.take(4)
        self.version = cursor.u32()
        if self.version not in VERSIONS:
            raise CheckpointError(
                f"{self.path} is GGUF version {self.version} or of another byte order; "
                f"little-endian versions {VERSIONS} are supported"
            )
        num_tensors, num_values = cursor.u64(), cursor.u64()
        #: Values by key: str, int, float, bool, or a list of one of them.
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.u32())
        self.tensors = self._read_tensors(cursor, num_tensors)

    def _read_tensors(self, cursor: _Cursor, count: int) -> dict[str, TensorInfo]:
        raw = [_read_tensor_header(cursor) for _ in range(count)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}")
        start = -(-cursor.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_id, offset in raw:
            info = _tensor_info(name, shape, type_id, start + offset, self.path)
            if info.offset + info.nbytes > len(self._map):
                raise CheckpointError(f"{self.path} is truncated: the data of {name} lies past its end")
            tensors[name] = info
        return tensors

    def data(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The raw bytes of a tensor, mapped, not copied."""
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        return np.frombuffer(self._map, np.uint8, count=info.nbytes, offset=info.offset)


def _read_tensor_header(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dimensions = cursor.u32()
    if dimensions > MAX_DIMENSIONS:
        raise CheckpointError(f"{cursor.path}: tensor {name} has {dimensions} dimensions")
    shape = tuple(cursor.u64() for _ in range(dimensions))
    return name, shape[::-1], cursor.u32(), cursor.u64()


def _tensor_info(name: str, shape: tuple[int, ...], type_id: int, offset: int, path: Path) -> TensorInfo:
    try:
        kind = GGMLType(type_id)
    except ValueError:
        known = ", ".join(member.name for member in GGMLType)
        raise CheckpointError(
            f"{path}: tensor {name} has GGML type {type_id}, which is not supported (supported: {known})"
        ) from None
    elements, size = BLOCKS[kind]
    count = math.prod(shape)
    if shape and shape[-1] % elements:
        raise CheckpointError(f"{path}: a row of {name} is no whole number of {kind.name} blocks")
    return TensorInfo(name, shape, kind, offset, count // elements * size)


class _Cursor:
    """Reads forward through the header, refusing to step past the end of the file."""

    def __init__(self, source: mmap.mmap, path: Path) -> None:
        self.at = 0
        self.path = path
        self._source = source
        self._size = len(source)

    def take(self, count: int) -> int:
        """Step over ``count`` bytes and return where they start."""
        at = self.at
        if count > self._size - at:
            raise CheckpointError(f"{self.path} is truncated or corrupt at byte {at}")
        self.at = at + count
        return at

    def u32(self) -> int:
        return int(_U32.unpack_from(self._source, self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self._source, self.take(8))[0])

    def string(self) -> str:
        count = self.u64()
        at = self.take(count)
        return self._source[at : at + count].decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self._numbers(kind, 1)[0]
        item_kind, count = self.u32(), self.u64()
        if item_kind == _STRING:
            return self._strings(count)
        if item_kind != _ARRAY:
            return self._numbers(item_kind, count)
        if depth >= MAX_NESTING or count > self._size - self.at:
            raise CheckpointError(f"{self.path} is corrupt: an array nests too deep at byte {self.at}")
        return [self.value(_ARRAY, depth + 1) for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> list[Any]:
        dtype = _SCALARS.get(kind)
        if dtype is None:
            raise CheckpointError(f"{self.path} is corrupt: metadata type {kind} at byte {self.at}")
        at = self.take(count * dtype.itemsize)
        values: list[Any] = np.frombuffer(self._source, dtype, count=count, offset=at).tolist()
        return values

    def _strings(self, count: int) -> list[str]:
        # One tight loop on locals instead of `string` per item: vocabularies have 100,000s of entries.
        source, size, at, unpack = self._source, self._size, self.at, _U64.unpack_from
        values: list[str] = []
        for _ in range(count):
            start = at + 8
            if start > size:
                break
            at = start + unpack(source, at)[0]
            if at > size:
                break
            values.append(source[start:at].decode("utf-8", "replace"))
        if len(values) != count:
            raise CheckpointError(f"{self.path} is truncated or corrupt: an array of {count} strings")
        self.at = at
        return values
