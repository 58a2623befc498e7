"""Small things about remote actors: making one of a plain class, and saying what went wrong."""

from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from outrider.cluster.errors import OutriderError, WorkerLostError


def make_actor(cls: type, options: dict[str, Any], *args: Any, **kwargs: Any) -> ActorHandle[Any]:
    """Start an actor of a plain class; what `ps` and Ray's tools show is the class's name."""
    return cast(ActorHandle[Any], ray.remote(**options)(cls).remote(*args, **kwargs))


def to_outrider_error(error: BaseException, what: str) -> OutriderError:
    """The error of ours that a worker raised, else a WorkerLostError: `what` and why, one line.

    Ray wraps what a method raised in a RayTaskError whose text is a traceback.
    """
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, OutriderError):
        return cause
    lines = str(cause).strip().split("\n")
    name = "" if cause is error else f"{type(cause).__name__}: "
    return WorkerLostError(f"{what}: {name}{lines[0] or type(cause).__name__}")
