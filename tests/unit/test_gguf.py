"""The GGUF reader: every metadata type, the tensor table, the bundled file, files that lie."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import numpy as np
import pytest

from tests.unit import gguf_writer as w
from workers.checkpoint import CheckpointError, GGUFFile, locate
from workers.checkpoint.gguf import GGMLType

METADATA = {
    "general.architecture": (w.STRING, "llama"),
    "u8": (w.U8, 255),
    "i8": (w.I8, -128),
    "u16": (w.U16, 65535),
    "i16": (w.I16, -2),
    "u32": (w.U32, 2**32 - 1),
    "i32": (w.I32, -3),
    "f32": (w.F32, 0.5),
    "yes": (w.BOOL, True),
    "u64": (w.U64, 2**63),
    "i64": (w.I64, -(2**63)),
    "f64": (w.F64, 0.1),
    "words": (w.ARRAY, (w.STRING, ["", "é", "\u4e16"])),
    "ids": (w.ARRAY, (w.I32, [1, -2, 3])),
    "none": (w.ARRAY, (w.STRING, [])),
    "nested": (w.ARRAY, (w.ARRAY, [(w.U8, [1]), (w.STRING, ["a"])])),
}
WANTED = {
    key: item[1] if kind == w.ARRAY and key != "nested" else item for key, (kind, item) in METADATA.items()
} | {"nested": [[1], ["a"]]}
TENSORS = {
    "a": ((2, 3), 0, np.arange(6, dtype="<f4").tobytes()),
    "q": ((2, 32), 8, bytes(range(68))),
    "b": ((5,), 30, bytes(10)),
}


@pytest.mark.parametrize("version", [2, 3])
def test_reads_every_metadata_type_and_the_tensor_table(tmp_path: Path, version: int) -> None:
    file = GGUFFile(w.write(tmp_path / "x.gguf", METADATA, TENSORS, version=version))
    assert file.metadata == WANTED
    assert type(file.metadata["yes"]) is bool
    assert [(t.name, t.shape, t.type, t.nbytes) for t in file.tensors.values()] == [
        ("a", (2, 3), GGMLType.F32, 24),
        ("q", (2, 32), GGMLType.Q8_0, 68),
        ("b", (5,), GGMLType.BF16, 10),
    ]
    assert file.data("a").view("<f4").tolist() == [0, 1, 2, 3, 4, 5]
    assert bytes(file.data("q")) == TENSORS["q"][2]


def test_honours_the_files_own_alignment(tmp_path: Path) -> None:
    metadata = {"general.alignment": (w.U32, 128)}
    file = GGUFFile(w.write(tmp_path / "x.gguf", metadata, TENSORS, alignment=128))
    assert file.tensors["q"].offset % 128 == 0
    assert bytes(file.data("q")) == TENSORS["q"][2]


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = w.gguf_bytes(METADATA, TENSORS)
    path = tmp_path / "x.gguf"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            GGUFFile(path)


def test_every_corrupt_byte_is_read_or_refused_but_never_crashes(tmp_path: Path) -> None:
    whole = bytearray(w.gguf_bytes(METADATA, TENSORS))
    path = tmp_path / "x.gguf"
    refused = 0
    for at in range(len(whole)):
        broken = bytearray(whole)
        broken[at] ^= 0xFF
        path.write_bytes(broken)
        try:
            GGUFFile(path)
        except CheckpointError:
            refused += 1
    assert refused > len(whole) // 4


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "cannot read"),
        (b"GGML" + bytes(60), "not a GGUF file"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "byte order"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "truncated"),
        (w.gguf_bytes({"x": (w.U32, 1)}, {"t": ((4,), 99, b"1234")}), "GGML type 99"),
        (w.gguf_bytes({}, {"t": ((33,), 8, bytes(100))}), "whole number of Q8_0 blocks"),
        (w.gguf_bytes({"general.alignment": (w.U32, 0)}), "alignment"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + w.string("x") + bytes([77, 0, 0, 0]), "metadata type 77"),
    ],
)
def test_says_what_is_wrong(tmp_path: Path, raw: bytes, says: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=says):
        GGUFFile(path)


def test_a_missing_file_and_a_missing_tensor_are_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        GGUFFile(tmp_path / "nothing.gguf")
    file = GGUFFile(w.write(tmp_path / "x.gguf", {}))
    with pytest.raises(CheckpointError, match="no tensor"):
        file.data("nothing")


def test_opens_the_bundled_file_fast() -> None:
    path = locate("smollm2-135m-instruct").path
    started = time.perf_counter()
    file = GGUFFile(path)
    assert time.perf_counter() - started < 1.5  # five times the promised 0.3 s
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(file.metadata["tokenizer.ggml.merges"]) == 48900
    assert file.tensors["token_embd.weight"].shape == (49152, 576)
