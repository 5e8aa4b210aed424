"""Where the text side of a model comes from: a folder as transformers writes it, or a GGUF file.

Both become one `TextSource`, so that codec and chat template never know which it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from workers.checkpoint import Checkpoint, CheckpointError, GGUFFile, Kind
from workers.text import folder, gguf


@dataclass(frozen=True, slots=True)
class TextSource:
    """A tokenizer, the names of its special tokens, and its chat templates."""

    tokenizer: Tokenizer
    #: Text of special tokens by their role in transformers' words: bos_token, eos_token, ...
    special_tokens: Mapping[str, str]
    #: Jinja sources by name; the one without a name of its own is "default".
    chat_templates: Mapping[str, str]


def read_template(path: str) -> str:
    """A chat template of the operator's own, in a file. Raises `CheckpointError`."""
    try:
        return Path(path).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read the chat template {path}: {error}") from error


def load_source(checkpoint: Checkpoint) -> TextSource:
    """Read the text side of a model; raises `CheckpointError` when it has none that can be used."""
    if checkpoint.kind is Kind.GGUF:
        metadata = GGUFFile(checkpoint.path).metadata
        return TextSource(
            gguf.build_tokenizer(metadata), gguf.special_tokens(metadata), gguf.chat_templates(metadata)
        )
    return TextSource(
        folder.read_tokenizer(checkpoint.path),
        folder.special_tokens(checkpoint.path),
        folder.chat_templates(checkpoint.path),
    )
