"""Which fields of a body this server knows, if only to ignore or to refuse them."""

from __future__ import annotations

from collections.abc import Iterable

from api.schemas import unsupported
from api.schemas.chat import ChatRequest
from api.schemas.completions import CompletionRequest

_KNOWN: dict[type[ChatRequest | CompletionRequest], frozenset[str]] = {
    ChatRequest: frozenset(ChatRequest.model_fields) | unsupported.CHAT.keys() | unsupported.IGNORED.keys(),
    CompletionRequest: frozenset(CompletionRequest.model_fields)
    | unsupported.COMPLETION.keys()
    | unsupported.IGNORED.keys(),
}


def unknown(schema: type[ChatRequest | CompletionRequest], names: Iterable[str]) -> list[str]:
    """Those of ``names`` that no request of this schema has, in their order."""
    known = _KNOWN[schema]
    return [name for name in names if name not in known]
