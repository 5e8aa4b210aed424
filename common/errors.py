"""One tree of errors, each of which knows its HTTP status and its OpenAI type and code.

The API renders them, workers carry them over the bus as (kind, message); nobody else maps them.
Foreign exceptions are turned into these at the edge where they come in.
"""

from __future__ import annotations


class MillstreamError(Exception):
    """Something went wrong inside the server."""

    status: int = 500
    type: str = "server_error"
    code: str | None = None
    #: Seconds after which the client may try again; sent as Retry-After.
    retry_after: float | None = None

    def __init__(
        self, message: str | None = None, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message or (self.__doc__ or "").strip().splitlines()[0])
        self.param = param
        if retry_after is not None:
            self.retry_after = retry_after

    @property
    def message(self) -> str:
        """The sentence the client reads."""
        return str(self.args[0])


class InvalidRequestError(MillstreamError):
    """The request is not valid."""

    status = 400
    type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """The prompt does not fit the model's context length."""

    code = "context_length_exceeded"


class UnauthorizedError(InvalidRequestError):
    """An API key is needed: send it as `Authorization: Bearer <key>`."""

    status = 401
    code = "invalid_api_key"


class PermissionDeniedError(MillstreamError):
    """The API key does not allow this."""

    status = 403
    type = "permission_error"


class NotFoundError(InvalidRequestError):
    """There is no such thing."""

    status = 404


class ModelNotFoundError(NotFoundError):
    """The model does not exist."""

    code = "model_not_found"


class MethodNotAllowedError(InvalidRequestError):
    """Not allowed method for this URL."""

    status = 405


class ConflictError(MillstreamError):
    """The Idempotency-Key was used with another request body."""

    status = 409
    type = "idempotency_error"


class PayloadTooLargeError(InvalidRequestError):
    """The request body is too large."""

    status = 413


class UnsupportedMediaTypeError(InvalidRequestError):
    """The request body must be application/json."""

    status = 415


class QueueFullError(MillstreamError):
    """The server's queue is full, try again later."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retry_after = 1.0


class RateLimitError(MillstreamError):
    """The API key has used up its rate limit, try again later."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retry_after = 1.0


class UnavailableError(MillstreamError):
    """The server cannot take requests now, try again later."""

    status = 503
    code = "service_unavailable"
    retry_after = 1.0


class DeadlineError(MillstreamError):
    """The request did not finish before its deadline."""

    status = 504
    code = "timeout"


class CancelledError(MillstreamError):
    """The request was cancelled."""

    status = 499
    code = "cancelled"


class WorkerCrashedError(MillstreamError):
    """The request was given up after workers crashed on it."""

    code = "worker_crashed"


#: Errors that travel over the bus, by the kind written into the `error` field of an entry.
BY_KIND: dict[str, type[MillstreamError]] = {
    "internal": MillstreamError,
    "invalid": InvalidRequestError,
    "context": ContextLengthError,
    "unavailable": UnavailableError,
    "deadline": DeadlineError,
    "cancelled": CancelledError,
    "crashed": WorkerCrashedError,
}
_KINDS = {error: kind for kind, error in BY_KIND.items()}


def kind_of(error: MillstreamError) -> str:
    """The kind under which ``error`` travels; anything without one is `internal`."""
    return _KINDS.get(type(error), "internal")


def from_kind(kind: str, message: str, param: str | None = None) -> MillstreamError:
    """The error that travelled as (kind, message, param); an unknown kind is a server error (B10)."""
    return BY_KIND.get(kind, MillstreamError)(message, param=param)
