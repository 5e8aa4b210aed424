"""Renders a conversation to the text a model was trained on, through the chat template it came with.

Templates are programs: they run in a sandbox with limits, and what they raise is the client's error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from common.errors import InvalidRequestError
from workers.checkpoint.errors import CheckpointError
from workers.text.limits import TemplateLimitError, cpu_limit
from workers.text.messages import ContentForm, normalize
from workers.text.sandbox import TemplateEnvironment
from workers.text.source import TextSource

#: CPU seconds one rendering may take; an ordinary one takes a thousandth.
CPU_SECONDS = 1.0
#: What `chat_template_kwargs` may not set, because other fields of a request do, or nobody may.
RESERVED = frozenset(
    {
        "chat_template", "messages", "conversation", "tools", "documents", "tokenize", "return_dict",
        "return_tensors", "add_generation_prompt", "continue_final_message", "padding", "truncation",
        "max_length", "return_assistant_tokens_mask", "tokenizer_kwargs", "self",
    }
)  # fmt: skip
#: Put after the text to be continued, to find its end in the rendered text: a Unicode noncharacter. The
#: space shows whether the template trims what follows a message.
_END_MARK = "\ufdd2"
_PROBE = "probe-4f1c"


class ChatTemplate:
    """The chat templates of one model; "tool_use" is taken for requests with tools, if there is one."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = TemplateEnvironment()
        self._special_tokens = dict(special_tokens)
        self._templates: dict[str, tuple[jinja2.Template, ContentForm]] = {}
        for name, text in templates.items():
            try:
                template = environment.from_string(text)
            except jinja2.TemplateSyntaxError as error:
                raise CheckpointError(f"the chat template {name} is not valid: {error}") from error
            self._templates[name] = (template, self._content_form(template, text))

    @classmethod
    def of(cls, source: TextSource) -> ChatTemplate:
        """The chat templates of a model; it may have none, and then refuses to render."""
        return cls(source.chat_templates, source.special_tokens)

    def render(
        self,
        messages: Any,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation. Every fault of messages or template is an `InvalidRequestError`."""
        template, form = self._select(bool(tools))
        reserved = sorted(RESERVED.intersection(kwargs or ()))
        if reserved:
            raise InvalidRequestError(
                f"chat_template_kwargs may not set {', '.join(reserved)}", param="chat_template_kwargs"
            )
        plain = normalize(messages, form)
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequestError(
                    "continue_final_message and add_generation_prompt exclude each other",
                    param="continue_final_message",
                )
            _mark_end(plain[-1])
        variables = {
            **(kwargs or {}),
            **self._special_tokens,
            "messages": plain,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = _run(template, variables)
        return _cut_at_mark(text) if continue_final_message else text

    def _select(self, with_tools: bool) -> tuple[jinja2.Template, ContentForm]:
        names = ("tool_use", "default") if with_tools else ("default",)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise InvalidRequestError("this model has no chat template; use /v1/completions", param="messages")

    def _content_form(self, template: jinja2.Template, text: str) -> ContentForm:
        """Find out what a template does with content by trying it, as reading it cannot tell."""

        def shows(content: Any) -> bool:
            variables = {
                **self._special_tokens,
                "messages": [{"role": "user", "content": content}],
                "tools": None,
                "add_generation_prompt": True,
            }
            try:
                shown = _run(template, variables)
            except InvalidRequestError:
                return False
            return _PROBE in shown and not re.search(r"""['"]type['"]""", shown)

        parts = shows([{"type": "text", "text": _PROBE}])
        return ContentForm(strings=not parts or shows(_PROBE), parts=parts, developer="developer" in text)


def _run(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    try:
        with cpu_limit(CPU_SECONDS):
            return template.render(variables)
    except TemplateLimitError as error:
        raise InvalidRequestError(str(error), param="messages") from error
    except jinja2.TemplateError as error:  # what templates raise on purpose, and undefined values
        raise InvalidRequestError(f"the chat template refused: {error.message}", param="messages") from error
    except Exception as error:  # whatever its operations raise on this input
        raise InvalidRequestError(
            f"the chat template failed on these messages: {type(error).__name__}: {error}", param="messages"
        ) from error


def _mark_end(message: dict[str, Any]) -> None:
    """Mark the end of the last message's text, which is left open."""
    content = message["content"]
    if message["role"] != "assistant":
        raise InvalidRequestError(
            "continue_final_message needs a last message of the role assistant", param="messages"
        )
    mark = f"{_END_MARK} "
    if isinstance(content, str):
        message["content"] = content + mark
    else:
        last = content[-1]["text"] if content else ""
        message["content"] = [*content[:-1], {"type": "text", "text": last + mark}]


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_END_MARK)
    if at < 0:
        raise InvalidRequestError(
            "the chat template does not show the last message, so it cannot be continued", param="messages"
        )
    kept = text[:at]
    return kept if text.startswith(f"{_END_MARK} ", at) else kept.rstrip()
