"""A Jinja environment for chat templates, which come with models and are not ours to trust.

Offers what transformers offers to templates, in Jinja's immutable sandbox, with `limits` at every place
where a template can make something large. Knows templates, not messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.filters import do_format, do_indent, do_replace, sync_do_join, sync_do_sum
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from workers.text import limits

#: Attributes that make much from little and that no chat template needs.
_FORBIDDEN = frozenset({"to_bytes", "translate"})
#: Filters for web pages and debugging, which no chat template needs and which would need limits of their own.
_REMOVED = ("forceescape", "pprint", "urlize", "wordwrap", "xmlattr")
#: Filters whose numeric arguments are widths or counts.
_NARROW = ("center", "batch", "slice", "round")


class GenerationTag(Extension):
    """``{% generation %}`` marks what a model wrote, for training; here its body is all that matters."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - the type that Jinja declares

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Formatter(SandboxedFormatter):
    """``str.format`` with limits on the width of each field and on what all fields make together."""

    _length = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        limits.check_widths_in(format_spec)
        limits.check_length(limits.weight(value))
        text = super().format_field(value, format_spec)
        self._length += len(text)
        limits.check_length(self._length)
        return text


class _Generator(CodeGenerator):
    """Compiles ``a ~ b`` to a call of ours, as Jinja has no hook to intercept it."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - named after the node
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, its limits, and the functions chat templates expect."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _Generator
    concat = staticmethod(limits.join)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
            finalize=_finalize,
        )
        del self.globals["lipsum"]
        for name in _REMOVED:
            del self.filters[name]
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.filters.update({name: _narrow(self.filters[name]) for name in _NARROW})
        self.filters.update(
            format=_format,
            indent=_indent,
            join=_join,
            replace=_replace,
            string=limits.to_text,
            sum=_sum,
            tojson=_tojson,
        )

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may touch an attribute."""
        return attr not in _FORBIDDEN and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An intercepted operator."""
        limits.check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Any call in a template. The odd names keep ``self`` and ``context`` free as keywords."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes):
            args = limits.check_method(getattr(__obj, "__name__", ""), owner, args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` and ``str.format_map``; None for anything else."""
        if super().wrap_str_format(value) is None:
            return None
        template, is_map = value.__self__, value.__name__ == "format_map"

        def limited(*args: Any, **kwargs: Any) -> str:
            if is_map:
                args, kwargs = (), *args
            return str(_Formatter(self).vformat(template, args, kwargs))

        return limited


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    limits.check_widths_in(format_)
    return datetime.now().strftime(format_)


def _finalize(value: Any) -> Any:
    """What ``{{ value }}`` prints; texts pass untouched."""
    return value if isinstance(value, str) else limits.to_text(value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter is for HTML and escapes what chat templates want as it is."""
    limits.check_width(indent * 100 if indent else 0)
    limits.check_length(limits.weight(value))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _narrow(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses large numbers in its arguments; its first one is the value it filters."""

    @wraps(function)
    def narrowed(value: Any, *args: Any, **kwargs: Any) -> Any:
        limits.check_width(*args, *kwargs.values())
        return function(value, *args, **kwargs)

    return narrowed


@jinja2.pass_eval_context
def _join(context: nodes.EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    items = list(value)
    limits.check_length(limits.weight(items) + len(items) * len(d))
    return sync_do_join(context, items, d, attribute)


@jinja2.pass_environment
def _sum(
    environment: jinja2.Environment, iterable: Any, attribute: str | int | None = None, start: Any = 0
) -> Any:
    items = list(iterable)
    if not isinstance(start, int | float):  # lists: each addition copies what was summed before
        limits.check_length(len(items) * limits.weight(items))
    return sync_do_sum(environment, items, attribute, start)


@jinja2.pass_eval_context
def _replace(context: nodes.EvalContext, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = limits.to_text(value), limits.to_text(old), limits.to_text(new)
    limits.check_method("replace", text, (old, new))
    return do_replace(context, text, old, new, count)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    limits.check_percent(limits.to_text(value), kwargs or args)
    return do_format(value, *args, **kwargs)


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = limits.to_text(value)
    limits.check_width(width)
    margin = width if isinstance(width, int) else len(width)
    limits.check_length(len(text) + (text.count("\n") + 1) * margin)
    return do_indent(text, width, first, blank)
