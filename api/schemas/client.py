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


#: Something the client says about itself that is accepted, and used for nothing.
Hint = Annotated[str, Field(strict=True, max_length=MAX_HINT)]
#: Printable ASCII without spaces, as the header X-Request-Id.
Label = Annotated[str, Field(strict=True, pattern=r"^[!-~]{1,128}$")]


class ClientFields(BaseModel):
    """Such fields, of both generation endpoints."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    user: Hint | None = None
    safety_identifier: Hint | None = None
    prompt_cache_key: Hint | None = None
    metadata: Annotated[Any, PlainValidator(_metadata, json_schema_input_type=dict[str, str] | None)] = None
    request_id: Label | None = None
    rid: Label | None = None
    cache_salt: Annotated[str, Field(strict=True, min_length=1, max_length=MAX_SALT)] | None = None
    priority: Annotated[int, Field(strict=True, ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None

    @property
    def label(self) -> str:
        """How the client calls its request; "" when it does not."""
        return self.request_id or self.rid or ""
