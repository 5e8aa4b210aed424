"""What a chat template may use up: CPU time, and the size of anything one operation makes.

A timer cannot stop a C call, so each operation that makes much from little is checked before it runs.
Knows values only; where they come up in Jinja is `sandbox`.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: Longest text, and longest list, that a template may make.
MAX_LENGTH = 32_000_000
MAX_ITEMS = 1_000_000
#: Bits of the largest whole number.
MAX_BITS = 4096
#: Widest padding, deepest indentation, longest batch.
MAX_WIDTH = 10_000
_NUMBER = re.compile(r"\d+")


class TemplateLimitError(Exception):
    """The chat template used more than a chat template may."""


class _OutOfTime(BaseException):
    """Raised by the timer; a BaseException, so that nothing in between takes it for the template's own."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise `TemplateLimitError` once the body has used ``seconds`` of CPU time. Main thread only.

    CPU time and not wall time: a busy machine must not make a good template fail.
    """
    assert threading.current_thread() is threading.main_thread(), "signals are handled by the main thread"

    def expire(_signal: int, _frame: FrameType | None) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGPROF, expire)
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        yield
    except _OutOfTime:
        raise TemplateLimitError(f"the chat template used more than {seconds:g} s of CPU time") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def check_length(length: int, limit: int = MAX_LENGTH) -> None:
    """Refuse a value of ``length``."""
    if length > limit:
        raise TemplateLimitError("the chat template made a value that is too large")


def check_width(*widths: Any) -> None:
    """Refuse a number of a size that would be made up of padding."""
    if any(isinstance(width, int | float) and width > MAX_WIDTH for width in widths):
        raise TemplateLimitError("the chat template asked for too much padding")


def check_widths_in(spec: str) -> None:
    """Refuse a format that asks for much padding."""
    if any(len(number) > 6 or int(number) > MAX_WIDTH for number in _NUMBER.findall(spec)):
        raise TemplateLimitError("the chat template asked for too much padding")


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Refuse ``left operator right`` when the result would be too large."""
    if operator == "+" and _is_sized(left) and _is_sized(right):
        check_length(len(left) + len(right), _limit_of(left))
    elif operator == "*":
        for value, count in ((left, right), (right, left)):
            if _is_sized(value) and isinstance(count, int):
                check_length(len(value) * count, _limit_of(value))
        if isinstance(left, int) and isinstance(right, int):
            check_length(left.bit_length() + right.bit_length(), MAX_BITS)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        check_length(left.bit_length() * max(right, 0), MAX_BITS)
    elif operator == "%" and isinstance(left, str):
        check_percent(left, right)


def check_percent(spec: str, args: Any) -> None:
    """Refuse a printf-style format by the widths it asks for, and by all arguments in every field."""
    values = (
        args if isinstance(args, tuple) else tuple(args.values()) if isinstance(args, Mapping) else (args,)
    )
    if "*" in spec:
        check_width(*values)
    check_widths_in(spec)
    check_length(len(spec) + spec.count("%") * max(map(weight, values), default=0))


def check_method(name: str, text: str | bytes, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Refuse a call of a text's method that makes too much; returns the arguments to call it with."""
    if name in {"center", "ljust", "rjust", "zfill"}:
        check_width(*args[:1])
    elif name == "expandtabs":
        check_length(len(text) * (int(args[0]) if args and isinstance(args[0], int) else 8))
    elif name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(text, str):
        check_length(len(text) + text.count(args[0]) * len(to_text(args[1])))
    elif name == "join" and args:
        items = list(args[0])
        check_length(weight(items) + len(items) * len(text))
        return (items, *args[1:])
    return args


def weight(value: Any) -> int:
    """About how long a value's text is, shared parts counted each time; stops once over the limits."""
    total, seen, queue = 0, 0, [value]
    while queue and total <= MAX_LENGTH:
        item = queue.pop()
        seen += 1
        if seen > MAX_ITEMS:
            return MAX_LENGTH + 1
        if isinstance(item, Mapping):
            queue.extend(item.keys())
            queue.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            queue.extend(item)
        total += len(item) if isinstance(item, str | bytes) else 8
    return total


def to_text(value: Any) -> str:
    """``str(value)``, unless it would be too long."""
    if isinstance(value, str):
        return value
    check_length(weight(value))
    return str(value)


def join(parts: Iterable[Any]) -> str:
    """``"".join`` that gives up as soon as the text gets too long."""
    texts: list[str] = []
    length = 0
    for part in parts:
        text = to_text(part)
        length += len(text)
        check_length(length)
        texts.append(text)
    return "".join(texts)


def _is_sized(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple)


def _limit_of(value: Any) -> int:
    return MAX_LENGTH if isinstance(value, str | bytes) else MAX_ITEMS
