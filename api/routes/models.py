"""`GET /v1/models` and `/v1/models/{id}`: what is served, the same on every replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from api.openapi import WITH_REDIS, describe
from api.schemas.answers import Model, ModelList
from api.service import Service
from common.bus.registry import ModelInfo
from common.errors import ModelNotFoundError, UnavailableError


def router(service: Service) -> APIRouter:
    """Both endpoints on ``service``."""
    routes = APIRouter()

    @routes.get("/v1/models", openapi_extra=describe(ModelList, fails=WITH_REDIS))
    async def models() -> Response:
        """All models, under each of their names."""
        _must_know(service)
        data = [
            _model(name, model)
            for model in service.registry.view.models.values()
            for name in (model.id, *model.aliases)
        ]
        return _json({"object": "list", "data": sorted(data, key=lambda each: str(each["id"]))})

    # A model's name may have slashes in it.
    @routes.get("/v1/models/{name:path}", openapi_extra=describe(Model, fails=(*WITH_REDIS, 404)))
    async def model(name: str) -> Response:
        """One model."""
        _must_know(service)
        found = service.registry.view.resolve(name)
        if found is None:
            await service.look_again()
            found = service.registry.view.resolve(name)
        if found is None:
            raise ModelNotFoundError(f"The model `{name[:100]}` does not exist.", param="model")
        return _json(_model(name, found))

    return routes


def _must_know(service: Service) -> None:
    """An empty list would say that nothing is served, which nobody knows while Redis is away."""
    if not service.registry.view.models and not service.redis_answers:
        raise UnavailableError("Redis cannot be reached.", retry_after=2.0)


def _model(name: str, model: ModelInfo) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "millstream",
        "root": model.id,
        "parent": None,
        "max_model_len": model.max_model_len,
    }


def _json(value: Mapping[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
