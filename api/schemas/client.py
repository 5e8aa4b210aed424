"""What a client says of itself and of what is its own: labels, hints, a priority. None is an identity."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError

MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
MAX_HINT = 1024
MAX_SALT = 256
#: Priorities go this far in both directions.
MAX_PRIORITY = 100


def _metadata(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise PydanticCustomError("metadata_type", "Input should be an object of strings")
    if len(value) > MAX_METADATA:
        raise PydanticCustomError(
            "metadata_count", "There may be at most {limit} pairs", {"limit": MAX_METADATA}
        )
    if any(len(key) > MAX_METADATA_KEY or len(each) > MAX_METADATA_VALUE for key, each in value.items()):
        raise PydanticCustomError(
            "metadata_size",
            "Keys may have at most {key} characters and values {value}",
            {"key": MAX_METADATA_KEY, "value": MAX_METADATA_VALUE},
        )
    return value


_Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=MAX_METADATA_KEY)],
        Annotated[str, Field(max_length=MAX_METADATA_VALUE)],
    ],
    Field(max_length=MAX_METADATA),
]
#: Something the client says about itself that is accepted, and used for nothing.
Hint = Annotated[str, Field(strict=True, max_length=MAX_HINT)]
#: Printable ASCII without spaces, as the header X-Request-Id.
Label = Annotated[str, Field(strict=True, pattern=r"^[!-~]{1,128}$")]


class ClientFields(BaseModel):
    """Such fields, of both generation endpoints."""

    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True)

    user: Hint | None = None
    """Up to 1024 characters; used for nothing."""
    safety_identifier: Hint | None = None
    """Up to 1024 characters; used for nothing."""
    prompt_cache_key: Hint | None = None
    """Up to 1024 characters; used for nothing."""
    metadata: Annotated[Any, PlainValidator(_metadata, json_schema_input_type=_Metadata | None)] = None
    """Up to 16 pairs of strings, of 64 and 512 characters; used for nothing."""
    request_id: Label | None = None
    """The client's name for the request, as the header `X-Request-Id`, which wins. Nothing is found by it."""
    rid: Label | None = None
    """The same as `request_id`, which wins."""
    cache_salt: Annotated[str, Field(strict=True, min_length=1, max_length=MAX_SALT)] | None = None
    """Only requests with the same salt find each other's prompts in the prefix cache."""
    priority: Annotated[int, Field(strict=True, ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """Lower is begun earlier, among those of its class that a scheduler has read. Left out: 0."""

    @property
    def label(self) -> str:
        """How the client calls its request; "" when it does not."""
        return self.request_id or self.rid or ""
