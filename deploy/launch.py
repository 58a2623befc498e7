"""Launch: serves a configuration on a Ray of its own, or on a running cluster, until stopped.

Promises that what cannot be placed or loaded ends in one sentence within `timeouts.load_s`, and
that nothing it started outlives it: Serve, Ray and every process under them are ended on every way
out, within 30 seconds. On a running cluster only the application is removed again.
"""

import contextlib
import errno
import functools
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import httpx
import psutil
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from outrider.cluster.config import Settings
from outrider.cluster.errors import ConfigError, UnavailableError
from outrider.cluster.placement import living_nodes, num_logical_cpus, plan, shortage
from outrider.deploy.serve_file import ServeFile, read_serve_file
from outrider.deploy.terminal import only_own_lines

_OBJECT_STORE_BYTES = 256 << 20  # only ids travel; Ray's default is 30 % of the machine's memory
_STOP_SERVE_S = 8.0
_STOP_PROCESSES_S = 5.0
_POLL_S = 0.2
_CONNECT_S = 5.0
_EVERYWHERE = ("0.0.0.0", "::")
_OWN_ERROR = re.compile(r"\b(?:ConfigError|WorkerLostError|UnavailableError): (.+)$", re.MULTILINE)


Build = Callable[[Settings], Application]
Report = Callable[[str], None]  # takes one line of progress


@dataclass(frozen=True)
class Server:
    """What runs, and where."""

    model_name: str
    url: str  # of the API, ends in /v1


@contextlib.contextmanager
def serving(
    path: str | Path,
    *,
    host: str | None = None,
    port: int | None = None,
    address: str | None = None,
    progress: TextIO,
    build: Build | None = None,
) -> Iterator[Server]:
    """Serve a file for as long as the context lasts; yields the server once it answers.

    `host` and `port` override the file's (port 0: any free one); `address` is that of a running
    Ray cluster. Progress is written to `progress`, line by line. `build` makes the application:
    null = the one in `deploy/app.py`. Raises ConfigError for what the file says wrong, and
    UnavailableError for what cannot be placed or loaded.
    """
    file = read_serve_file(path, host, port)
    if file.port == 0:
        file = read_serve_file(path, host, _free_port())
    if address is None:
        check_port(file.host, file.port)
        if metrics_port := file.settings.metrics.port:
            check_port(file.settings.metrics.host, metrics_port, "metrics.host and metrics.port")
    else:
        _check_reachable(address)
    deadline = time.monotonic() + file.settings.timeouts.load_s
    report = functools.partial(print, file=progress, flush=True)
    with (
        only_own_lines(sys.stdout, sys.stderr, progress),
        _ray(file, address, report),
        _application(file, address, build, report) as missing,
    ):
        _wait_until_ready(file, address, deadline, missing)
        yield Server(file.settings.model_name, f"{file.root_url}/v1")


def check_port(host: str, port: int, setting: str = "--host and --port") -> None:
    """UnavailableError when nobody can listen there: Serve's proxies would share a port in use."""
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.create_server(address[:2], family=family):
            return
    except (OSError, OverflowError, UnicodeError) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number and number > 0 else str(error)
        if number == errno.EADDRINUSE and not _is_listening(host, port):
            return  # closed connections of an earlier server linger; Serve can listen beside them
    raise UnavailableError(
        f"cannot listen at {host}:{port}: {reason}: choose another with {setting}"
    )


def _is_listening(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


def _check_reachable(address: str) -> None:
    """UnavailableError if nobody listens at host:port: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return  # "auto", or a form that only Ray understands
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_S):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise UnavailableError(
            f"cannot connect to the Ray cluster at {address}: {reason}"
        ) from None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _ray(file: ServeFile, address: str | None, report: Report) -> Iterator[None]:
    """Ray, connected; a Ray of our own ends with the context, and all of its processes with it."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        _start_ray(file, address, report)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray has put its own handler there
        yield
    finally:
        processes = psutil.Process().children(recursive=True) if address is None else []
        try:
            ray.shutdown()
        finally:
            _, left = psutil.wait_procs(processes, timeout=_STOP_PROCESSES_S)
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def _start_ray(file: ServeFile, address: str | None, report: Report) -> None:
    try:
        if address is None:
            num_cpus = num_logical_cpus(file.settings)
            report(f"starting Ray with {num_cpus} logical CPU{'s' * (num_cpus > 1)}")
            ray.init(
                address="local",  # never a cluster that happens to run on this host
                num_cpus=num_cpus,
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                logging_level=logging.ERROR,
            )
        else:
            report(f"connecting to the Ray cluster at {address}")
            ray.init(address=address, logging_level=logging.ERROR)
    except SystemExit:
        raise KeyboardInterrupt from None  # Ray's own SIGTERM handler
    except Exception as error:  # whatever goes wrong in there, it is the end; say what
        reason = _last_line(str(error))
        if address is None:
            raise UnavailableError(f"cannot start Ray: {reason}") from error
        raise UnavailableError(
            f"cannot connect to the Ray cluster at {address}: {reason} (a cluster that asks for a "
            "token wants RAY_AUTH_MODE=token and its ~/.ray/auth_token here, too)"
        ) from error


@contextlib.contextmanager
def _application(
    file: ServeFile, address: str | None, build: Build | None, report: Report
) -> Iterator[str | None]:
    """The application, deployed but not ready yet; yields what is missing to place it, if known."""
    missing = shortage(plan(file.settings), living_nodes(ray.nodes()))
    if missing is not None:
        if address is None:
            raise UnavailableError(missing)
        # Nodes may still come: an autoscaler adds them for what waits to be placed.
        report(f"waiting for nodes: {missing}")
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)  # errors come back as sentences
    if address is not None and file.name in serve.status().applications:
        raise ConfigError(
            f"an application {file.name!r} runs on that cluster already: delete it or choose "
            "another `name`"
        )
    if build is None:
        from outrider.deploy import app  # torch is slow to import: not before it is needed

        build = app.build
    try:
        report(f"deploying {file.settings.model_name}")
        _start_serve(file)
        if address is not None:
            check_http_options(file)
        target = serve.RunTarget(build(file.settings), file.name, file.route_prefix)
        serve.run_many(
            [target],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        yield missing
    finally:
        _within(
            _STOP_SERVE_S, serve.shutdown if address is None else lambda: serve.delete(file.name)
        )


def _start_serve(file: ServeFile) -> None:
    try:
        serve.start(http_options=file.http_options, logging_config=file.logging_config)
    except (RayError, TimeoutError) as error:
        raise UnavailableError(
            "Ray Serve could not start its HTTP proxy in time: the machine may be overloaded; "
            "try again"
        ) from error


def check_http_options(file: ServeFile) -> None:
    """UnavailableError if Serve ran before and listens elsewhere: it keeps the options it has."""
    client = _get_global_client()  # Serve tells nobody else where it listens
    assert client is not None, "Serve was started above"
    running = client.http_config
    if running.port != file.port or running.host not in (file.host, *_EVERYWHERE):
        raise UnavailableError(
            f"Serve runs on that cluster already, at {running.host}:{running.port}: say so with "
            "--host and --port, or end it with `serve shutdown`"
        )


def _wait_until_ready(
    file: ServeFile, address: str | None, deadline: float, missing: str | None
) -> None:
    """Return when the application answers; the reason, as UnavailableError, when it cannot."""
    is_here = address is None  # a cluster's proxies need not be reachable from here
    while True:
        overview = serve.status().applications.get(file.name)
        if overview is not None:
            if overview.status == ApplicationStatus.RUNNING and (not is_here or _answers(file)):
                return
            if sentence := find_failure(overview):
                raise UnavailableError(sentence)
        if time.monotonic() > deadline:
            limit_s = file.settings.timeouts.load_s
            reason = missing or "raise timeouts.load_s if that is too short"
            raise UnavailableError(f"not ready within {limit_s:g} s (timeouts.load_s): {reason}")
        time.sleep(_POLL_S)


def find_failure(overview: ApplicationStatusOverview) -> str | None:
    """Why a deployment fails, in one sentence; None while there is hope.

    Serve reports a replica that fails to start as a traceback. When our own error is in it, that
    is the reason, and another attempt would only find the same.
    """
    messages = [deployment.message for deployment in overview.deployments.values()]
    for message in (*messages, overview.message):
        if own := _OWN_ERROR.findall(message):
            return str(own[-1]).strip()
    if overview.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
        said = next(filter(None, (*messages, overview.message)), "")
        return (
            f"the application failed to start: {_last_line(said)} (see logs/serve of Ray's session)"
        )
    return None


def _answers(file: ServeFile) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{file.root_url}/health", timeout=5, trust_env=False).status_code == 200
    return False


def _within(limit_s: float, function: Callable[[], object]) -> None:
    """Call `function`, but go on after `limit_s`: what it did not end is ended by force."""

    def call() -> None:
        with contextlib.suppress(Exception):  # Serve may be half started or half dead
            function()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(limit_s)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was given"
