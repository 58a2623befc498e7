"""A Serve configuration file as Outrider's own commands read it: one application, ours.

Whatever the file says is either honoured or refused, never passed over in silence.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from outrider.cluster.config import Settings, load_settings
from outrider.cluster.errors import ConfigError

IMPORT_PATH = "outrider.deploy.app:build"
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000


@dataclass(frozen=True)
class ServeFile:
    """What to serve, under which name and route, and how the HTTP proxy listens."""

    settings: Settings
    name: str
    route_prefix: str  # "/" or "/some/path"
    http_options: dict[str, Any]  # as in the file; host and port always there
    logging_config: dict[str, Any] | None

    @property
    def host(self) -> str:
        """Where the proxy listens."""
        return str(self.http_options["host"])

    @property
    def port(self) -> int:
        """Where the proxy listens."""
        return int(self.http_options["port"])

    @property
    def root_url(self) -> str:
        """Where this machine reaches the application, without a slash at the end."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{host}:{self.port}{self.route_prefix.rstrip('/')}"


def read_serve_file(
    path: str | Path, host: str | None = None, port: int | None = None
) -> ServeFile:
    """Read and check a file; `host` and `port` override its own. ConfigError says what is wrong."""
    settings = load_settings(path)
    document = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    try:
        schema = ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        key = ".".join(map(str, wrong["loc"]))
        message = wrong["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{path}: {key}: {message}") from None
    if others := sorted(set(document) - {"applications", "http_options", "logging_config"}):
        raise ConfigError(f"{path}: {', '.join(others)}: only `serve run` reads this: remove it")
    if len(schema.applications) > 1:
        raise ConfigError(
            f"{path}: Outrider's commands take one application, this file has "
            f"{len(schema.applications)}: use `serve run` for several"
        )
    (application,) = schema.applications
    if application.import_path != IMPORT_PATH:
        raise ConfigError(f"{path}: applications[0].import_path must be {IMPORT_PATH}")
    if application.deployments or application.runtime_env:
        raise ConfigError(
            f"{path}: `deployments` and `runtime_env` are for `serve run`: remove them, "
            "settings go into `args`"
        )
    route_prefix = application.route_prefix or ""
    if not route_prefix.startswith("/"):
        raise ConfigError(f"{path}: applications[0].route_prefix must begin with /")
    options = {"host": DEFAULT_HOST, "port": DEFAULT_PORT, **(document.get("http_options") or {})}
    if host is not None:
        options["host"] = host
    if port is not None:
        options["port"] = port
    return ServeFile(
        settings, application.name, route_prefix, options,
        document.get("logging_config"),
    )  # fmt: skip
