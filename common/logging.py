"""Log lines with fields, for people or as JSON, each naming the role and the worker that wrote it.

Callers pass facts as fields, never prompts or generated text; long values are cut all the same.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import UTC, datetime

_VALUE_LIMIT = 300


class Log:
    """A named logger whose messages carry fields: ``log.info("lease lost", partition=1)``."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, message: str, **fields: object) -> None:
        """What only someone who debugs wants to know."""
        self._log(logging.DEBUG, message, fields)

    def info(self, message: str, **fields: object) -> None:
        """What an operator wants to know in a quiet hour."""
        self._log(logging.INFO, message, fields)

    def warning(self, message: str, **fields: object) -> None:
        """What went wrong and was dealt with."""
        self._log(logging.WARNING, message, fields)

    def error(self, message: str, **fields: object) -> None:
        """What went wrong and needs someone."""
        self._log(logging.ERROR, message, fields)

    def exception(self, message: str, **fields: object) -> None:
        """An error with the traceback of the exception being handled."""
        self._log(logging.ERROR, message, fields, exc_info=True)

    def _log(self, level: int, message: str, fields: dict[str, object], *, exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", message, extra={"fields": fields}, exc_info=exc_info)


def setup(level: str, form: str, role: str, worker_id: str = "") -> None:
    """Send all logging of this process, other libraries' and warnings included, to stderr."""
    formatter = _JsonFormatter(role, worker_id) if form == "json" else _TextFormatter(role, worker_id)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)


def flush() -> None:
    """Write out what was logged and printed, before an exit that skips the interpreter's own."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()


class _TextFormatter(logging.Formatter):
    """`12:30:01.123 scheduler worker-id INFO weights loaded seconds=2.1`."""

    def __init__(self, role: str, worker_id: str) -> None:
        super().__init__()
        # A worker id starts with its role; saying it twice would only push the message to the right.
        self._who = worker_id if worker_id.startswith(role) else f"{role} {worker_id}".rstrip()

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        parts = [
            f"{moment}.{int(record.msecs):03d}",
            self._who,
            record.levelname,
            record.getMessage(),
        ]
        parts += [f"{name}={_shown(value)}" for name, value in _fields(record).items()]
        if record.exc_info:
            parts.append("\n" + self.formatException(record.exc_info))
        return " ".join(parts)


class _JsonFormatter(logging.Formatter):
    """One JSON object per line; fields are members beside the fixed ones, which win over a field's name."""

    def __init__(self, role: str, worker_id: str) -> None:
        super().__init__()
        self._who = {"role": role, "worker": worker_id}

    def format(self, record: logging.LogRecord) -> str:
        line = {name: _plain(value) for name, value in _fields(record).items()} | {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **self._who,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # Not orjson: it refuses lone surrogates, and a log line must come out whatever is in it.
        return json.dumps(line)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = getattr(record, "fields", {})
    return fields if isinstance(fields, dict) else {}


def _shown(value: object) -> str:
    """A field's value for people: short, on one line, quoted when it has spaces or what a terminal obeys."""
    text = str(round(value, 3)) if isinstance(value, float) else str(value)
    text = text if len(text) <= _VALUE_LIMIT else text[:_VALUE_LIMIT] + "..."
    return text if text and text.isprintable() and " " not in text else repr(text)


def _plain(value: object) -> object:
    """A field's value for JSON: numbers and flags as they are, all else as short text."""
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 2**53):
        return value
    return _shown(value) if not isinstance(value, str) else value[:_VALUE_LIMIT]
