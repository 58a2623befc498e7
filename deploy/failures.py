"""Errors as OpenAI's clients know them: one table, read forwards by the ingress, backwards by ours.

| error               | HTTP | type                  | code                 |
|---------------------|------|-----------------------|----------------------|
| UnknownModelError   | 404  | invalid_request_error | model_not_found      |
| RequestError        | 400  | invalid_request_error |                      |
| OverloadedError     | 429  | rate_limit_error      | rate_limit_exceeded  |
| UnavailableError    | 503  | unavailable_error     | service_unavailable  |
| anything else       | 500  | server_error          | internal_error       |
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.cluster.errors import (
    OutriderError,
    OverloadedError,
    RequestError,
    UnavailableError,
    WorkerLostError,
)

RETRY_AFTER_S = 1


class UnknownModelError(RequestError):
    """A request for a model that is not served here."""


@dataclass(frozen=True)
class Failure:
    """One error, ready to be sent."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error body."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def unwrap(error: BaseException) -> BaseException:
    """The error that was raised, out of the envelopes that Ray puts around it on the wire."""
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    return error


def to_outrider_error(error: Exception, whom: str) -> Exception:
    """The error of ours that a Serve call raised or amounts to; `error` itself if it is neither.

    `whom` says who was called.
    """
    # Only who has called through Serve gets here; a client over HTTP needs no Ray.
    from ray.exceptions import RayError
    from ray.serve.exceptions import BackPressureError, RayServeException

    cause = unwrap(error)
    if isinstance(cause, OutriderError):
        return cause
    if isinstance(cause, BackPressureError):
        return (OverloadedError if cause.status_code == 429 else UnavailableError)(cause.message)
    if isinstance(cause, RayError | RayServeException):
        return UnavailableError(f"{whom} was lost: {cause}")
    return error


def describe_failure(error: BaseException) -> Failure:
    """How `error` is told to an HTTP client; what is not ours is told without its details."""
    if isinstance(error, UnknownModelError):
        return Failure(404, str(error), "invalid_request_error", error.param, "model_not_found")
    if isinstance(error, RequestError):
        return Failure(400, str(error), "invalid_request_error", error.param)
    if isinstance(error, OverloadedError):
        headers = {"retry-after": str(RETRY_AFTER_S)}
        return Failure(429, str(error), "rate_limit_error", None, "rate_limit_exceeded", headers)
    if isinstance(error, UnavailableError | WorkerLostError):
        return Failure(503, str(error), "unavailable_error", None, "service_unavailable")
    message = "internal error: the server's log has it under the x-request-id of this answer"
    return Failure(500, message, "server_error", None, "internal_error")


def read_failure(body: object, status: int | None = None) -> OutriderError:
    """The error that a server told by an error body, or by no more than an HTTP status."""
    error = body.get("error") if isinstance(body, Mapping) else None
    details: Mapping[str, Any] = error if isinstance(error, Mapping) else {}
    message = str(details.get("message") or f"the server answered with HTTP status {status}")
    param = details.get("param")
    if details.get("code") == "model_not_found":
        return UnknownModelError(message, param)
    if details.get("type") == "rate_limit_error" or status == 429:
        return OverloadedError(message)
    if details.get("type") == "invalid_request_error" or 400 <= (status or 500) < 500:
        return RequestError(message, param)
    return UnavailableError(message)
