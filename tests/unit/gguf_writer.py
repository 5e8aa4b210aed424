"""Writes tiny GGUF files for tests from the format's description; shares nothing with the reader."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_PACK = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q"}
_PACK[F64] = "d"


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, item: Any) -> bytes:
    if kind == STRING:
        return string(item)
    if kind == ARRAY:
        item_kind, items = item
        head = struct.pack("<IQ", item_kind, len(items))
        return head + b"".join(value(item_kind, each) for each in items)
    return struct.pack(f"<{_PACK[kind]}", item)


def gguf_bytes(
    metadata: dict[str, tuple[int, Any]],
    tensors: dict[str, tuple[tuple[int, ...], int, bytes]] | None = None,
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """``tensors`` maps names to (row-major shape, GGML type, raw bytes)."""
    tensors = tensors or {}
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, (kind, item) in metadata.items():
        out += string(key) + struct.pack("<I", kind) + value(kind, item)
    data = b""
    for name, (shape, kind, raw) in tensors.items():
        data += bytes(-len(data) % alignment)
        out += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(data))
        data += raw
    return out + bytes(-len(out) % alignment) + data


def write(path: Path, *args: Any, **kwargs: Any) -> Path:
    path.write_bytes(gguf_bytes(*args, **kwargs))
    return path
