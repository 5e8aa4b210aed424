"""Reads tokenizer files of a model folder as transformers writes them.

Knows file names and their fields; transformers itself is asked only for folders without a tokenizer.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from workers.checkpoint.errors import CheckpointError

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer, converted by transformers when there is no tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _convert_slow(folder)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for anything wrong with the file
        raise CheckpointError(f"cannot read {path}: {error}") from error
    # What the tokenizer's author trained with is no business of a server that checks lengths itself.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _convert_slow(folder: Path) -> Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and transformers is not installed to convert its tokenizer"
        ) from error
    try:
        backend = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    except Exception as error:  # conversion runs many libraries' code
        raise CheckpointError(f"{folder} has no tokenizer that can be read: {error}") from error
    return Tokenizer.from_str(backend.to_str())


def special_tokens(folder: Path) -> dict[str, str]:
    """Special tokens by role; tokenizer_config.json wins over the older special_tokens_map.json."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        fields = _read_json(folder / name)
        for role in ROLES:
            text = _token_text(fields.get(role))
            if text is not None:
                found[role] = text
    return found


def chat_templates(folder: Path) -> dict[str, str]:
    """Chat templates by name. A chat_template.jinja file wins over the fields of the JSON files."""
    templates: dict[str, str] = {}
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = _read_json(folder / name).get("chat_template")
        if isinstance(value, str):
            templates["default"] = value
        elif isinstance(value, list):
            templates.update({item["name"]: item["template"] for item in value if isinstance(item, dict)})
    single = folder / "chat_template.jinja"
    if single.is_file():
        templates["default"] = single.read_text("utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text("utf-8")
    return templates


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def _token_text(value: Any) -> str | None:
    """A token is written as its text, or as an object that has it as ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
