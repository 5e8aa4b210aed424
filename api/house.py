"""The rules of this server that its settings make for every generation, beside what its client asks for.

What they decide about an answer is written into the request (`Request.reply`), so that every replica gives
the same answer, whatever its own settings are.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import orjson

from api.reasoning import BEGUN, is_open
from api.schemas.chat import ChatRequest
from api.schemas.completions import CompletionRequest
from api.schemas.known import unknown
from api.schemas.messages import text_of
from common.bus.keys import BATCH
from common.errors import InvalidRequestError
from common.logging import Log
from common.messages import Request
from common.settings import Settings

log = Log(__name__)

#: That a field is ignored is written down once in so many seconds, of at most so many fields.
_QUIET_S, _NAMES = 60.0, 100
_SHOWN = 64


class House:
    """Of one API process."""

    def __init__(self, settings: Settings) -> None:
        self._parser = "" if settings.reasoning_parser == "none" else settings.reasoning_parser
        self._always_usage = settings.enable_force_include_usage
        self._strict = settings.strict_fields
        self._template_kwargs: dict[str, Any] = orjson.loads(settings.default_chat_template_kwargs)
        #: Names of ignored fields, and when they were last written down.
        self._told: dict[str, float] = {}

    def look_at(self, schema: type[ChatRequest | CompletionRequest], names: Iterable[str]) -> None:
        """Says which fields of a body are unknown: to the client if the rules are strict, else to the log."""
        strange = unknown(schema, names)
        if not strange:
            return
        name = strange[0][:_SHOWN]
        if self._strict:
            raise InvalidRequestError(f"Unrecognized request argument supplied: {name}", param=name)
        now = time.monotonic()
        if now - self._told.get(name, -_QUIET_S) >= _QUIET_S:
            if len(self._told) >= _NAMES:
                self._told.clear()
            self._told[name] = now
            log.warning("a field is not known and was ignored", field=name)

    def dress(self, request: Request, ask: ChatRequest | CompletionRequest, label: str) -> Request:
        """``request``, made of ``ask``, as it goes onto the bus; ``label`` is the client's header, or ""."""
        reply: dict[str, Any] = {}
        if ask.service_tier is not None:
            reply["tier"] = "flex" if request.cls == BATCH else "default"
        if self._always_usage:
            reply["usage"] = True
        if self._parser and isinstance(ask, ChatRequest) and (parser := self._parser_for(ask)):
            reply["reasoning"] = parser
            if ask.include_reasoning is False:
                reply["hide_reasoning"] = True
        label, salt, priority = label or ask.label, ask.cache_salt or "", ask.priority or 0
        if not (reply or label or salt or priority):  # as it mostly is
            return request
        return replace(request, reply={**request.reply, **reply}, label=label, salt=salt, priority=priority)

    def _parser_for(self, ask: ChatRequest) -> str:
        """What tells the reasoning in the answer; empty where there is none to be told."""
        if ask.separate_reasoning is False:
            return ""
        if ask.continue_final_message:
            # No template comes between: the answer goes on where the message ends.
            return BEGUN if is_open(text_of(ask.messages[-1])) else ""
        kwargs = self._template_kwargs | (ask.chat_template_kwargs or {})
        return "" if self._parser == "qwen3" and kwargs.get("enable_thinking") is False else self._parser
