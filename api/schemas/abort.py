"""`POST /abort_request`: the request, in SGLang's shape."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from api.schemas.common import Schema


class AbortRequest(Schema):
    """A generation to be cancelled."""

    rid: Annotated[str, Field(strict=True, min_length=1, max_length=128)]
    """The id that its answer has, or its header `millstream-request`."""
