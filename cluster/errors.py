"""Every error that Outrider raises on purpose; users catch a branch, the ingress maps it.

OutriderError
├── ConfigError        a setting, file or model that cannot work; the message says what to change
├── RequestError       a request that cannot be served as asked (HTTP 400); `param` names the field
├── OverloadedError    the queue is full (HTTP 429): try again later
├── UnavailableError   the target is down or shutting down (HTTP 503)
└── WorkerLostError    a remote worker died or hung; the coordinator recovers from it

Constructors take positional arguments only: errors cross process borders by pickle.
"""


class OutriderError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(OutriderError):
    """A setting, file or model that cannot work."""


class RequestError(OutriderError):
    """A request that cannot be served as asked."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class OverloadedError(OutriderError):
    """Too many sequences wait already."""


class UnavailableError(OutriderError):
    """The target cannot serve now."""


class WorkerLostError(OutriderError):
    """A remote worker died, hung or broke the protocol."""
