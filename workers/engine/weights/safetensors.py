"""Weights from safetensors files: one, or shards with an index. Tensors are read when asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from workers.checkpoint import CheckpointError
from workers.checkpoint.fields import Fields

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class SafetensorsWeights:
    """See `Weights`. ``folder`` holds one file, or several, with an index or without."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder = folder
        self._dtype = dtype
        self._files: dict[str, Any] = {}
        self._file_of = self._index()

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """See `Weights.get`."""
        file = self._file_of.get(name)
        if file is None:
            raise CheckpointError(f"{self._folder} has no tensor {name}")
        where = f"{name} in {self._folder / file}"
        try:
            tensor: torch.Tensor = self._open(file).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"cannot read {where}: {error}") from error
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{where} has shape {tuple(tensor.shape)}, not {shape}")
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"{where} is {tensor.dtype}, which is not supported")
        # Always a copy: a tensor that stays a view of the file would end the process with the file.
        return tensor.to(self._dtype, copy=True)

    def _index(self) -> dict[str, str]:
        """Which file holds each tensor."""
        index = self._folder / INDEX_FILE
        if index.is_file():
            section = Fields.from_json(index).section("weight_map")
            if section is None:
                raise CheckpointError(f"{index} lacks weight_map")
            # The name only: an index has no business outside its folder.
            return {name: Path(str(file)).name for name, file in section.values.items()}
        single = self._folder / SINGLE_FILE
        files = [single] if single.is_file() else sorted(self._folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{self._folder} holds no safetensors files")
        names = {file.name: self._open(file.name).keys() for file in files}
        return {name: file for file, held in names.items() for name in held}

    def _open(self, file: str) -> Any:
        opened = self._files.get(file)
        if opened is None:
            try:
                opened = self._files[file] = safe_open(self._folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"cannot read {self._folder / file}: {error}") from error
        return opened
