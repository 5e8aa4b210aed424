"""`python -m cli.surface`: writes docs/api.md, the tables of endpoints and fields, from the code.

What an endpoint or a field means is said where it is defined; here it is only put into rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from api.app import description
from api.openapi import ALWAYS, BODIES, FAILURES
from api.schemas.unsupported import IGNORED

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
_HEAD = """\
# Endpoints and fields

Made from the code by `python -m cli.surface`; a running server says the same at `/openapi.json`, with the
shapes of all answers. How it behaves is in [http.md](http.md).

Types are strict: `true` is no number, and neither `"1"` nor `1.0` is an integer. Null means "left out".
Fields that are named nowhere here are ignored. Any request may get 400, 408, 431 and 500."""
_ENDPOINTS = {
    "ChatRequest": "chat",
    "CompletionRequest": "completions",
    "TokenizeRequest": "tokenize",
    "DetokenizeRequest": "detokenize",
    "AbortRequest": "abort",
}


def page() -> str:
    """The whole page."""
    described = description()
    schemas = described["components"]["schemas"]
    parts = [
        _HEAD,
        "## Endpoints",
        _table(("endpoint", "what it does", "errors of its own"), _endpoints(described["paths"])),
        "## Fields that are served",
        _table(("field", "of", "value", "meaning"), _fields(schemas)),
        "## Fields that are accepted and ignored",
        "They change nothing that this server does.",
        _table(("field", "why"), ((f"`{name}`", why) for name, why in IGNORED.items())),
        "## Fields that are refused with 400",
        "Unless they ask for nothing, because ignoring them would change the answer.",
        _table(("field", "of", "asks for nothing"), _refused()),
        "## Headers",
        _table(("request header", "of", "meaning"), _headers(described["paths"])),
        "## Errors",
        _table(("status", "when"), ((str(status), when) for status, when in FAILURES.items())),
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _endpoints(paths: Mapping[str, Any]) -> Iterable[tuple[str, ...]]:
    always = {"200", *map(str, ALWAYS)}
    for path, methods in paths.items():
        for method, operation in methods.items():
            own = [status for status in operation["responses"] if status not in always]
            yield f"`{method.upper()} {path}`", operation["description"], ", ".join(sorted(own))


def _fields(schemas: Mapping[str, Any]) -> Iterable[tuple[str, ...]]:
    """A row for each field, once for all endpoints where it means the same."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for body in BODIES:
        schema = schemas[body.__name__]
        for name in body.model_fields:
            said = schema["properties"][name]
            value = _value(said, schemas)
            if name in schema.get("required", ()):
                value += "; required"
            meaning = " ".join(said["description"].split())
            rows.setdefault((f"`{name}`", value, meaning), []).append(_ENDPOINTS[body.__name__])
    for (name, value, meaning), endpoints in rows.items():
        yield name, ", ".join(endpoints), value, meaning


def _value(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """A JSON schema in a few words; null goes without saying."""
    if "$ref" in schema:
        return "object" if schemas[schema["$ref"].rpartition("/")[2]]["type"] == "object" else "value"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "anyOf" in schema:
        options = [_value(option, schemas) for option in schema["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(options))
    bounds = _bounds(schema)
    if schema.get("type") != "array":
        return f"{schema.get('type', 'any')} {bounds}".strip()
    return f"list {f'({bounds}) ' if bounds else ''}of {_value(schema['items'], schemas)}"


def _bounds(schema: Mapping[str, Any]) -> str:
    low, high = (
        next((schema[name] for name in names if name in schema), None)
        for names in (("minimum", "minLength", "minItems"), ("maximum", "maxLength", "maxItems"))
    )
    if low is None and high is None:
        return ""
    words = f"up to {high}" if low is None else f"from {low}" if high is None else f"{low} to {high}"
    units = {"string": " characters", "array": " items"}
    return words + units.get(schema["type"], "")


def _refused() -> Iterable[tuple[str, ...]]:
    rows: dict[tuple[str, str], list[str]] = {}
    for body, refused in BODIES.items():
        for name, harmless in refused.items():
            values = harmless.schema.get("enum")
            asks = "null, or `type` is `text`" if values is None else ", ".join(map(_literal, values))
            rows.setdefault((f"`{name}`", asks), []).append(_ENDPOINTS[body.__name__])
    for (name, asks), endpoints in rows.items():
        yield name, ", ".join(endpoints), asks


def _literal(value: object) -> str:
    return "null" if value is None else f"`{json.dumps(value)}`"


def _headers(paths: Mapping[str, Any]) -> Iterable[tuple[str, ...]]:
    rows: dict[tuple[str, str], list[str]] = {}
    operations = 0
    for path, methods in paths.items():
        for operation in methods.values():
            operations += 1
            for each in operation["parameters"]:
                if each["in"] == "header":
                    rows.setdefault((each["name"], each["description"]), []).append(path)
    for (name, meaning), of in rows.items():
        where = "all" if len(of) == operations else ", ".join(f"`{path}`" for path in of)
        yield f"`{name}`", where, meaning


if __name__ == "__main__":
    PAGE.write_text(page())
