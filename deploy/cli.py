"""Command line: `outrider serve`, `check`, `top`, `bench` and `dashboard`.

Exit codes: 0 done, 1 it did not work, 2 the command or the file is wrong, 130 interrupted. What
went wrong is one sentence on stderr. Heavy packages are imported only by the command that needs
them.
"""

import argparse
import contextlib
import functools
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib import metadata
from types import FrameType
from typing import TYPE_CHECKING

from outrider.cluster.errors import ConfigError, OutriderError
from outrider.deploy.terminal import one_line

if TYPE_CHECKING:
    from outrider.deploy.launch import Build

_COMMANDS = {  # each in a module of its name
    "top": "watch a server's acceptance rates and speed",
    "dashboard": "write the Grafana dashboard, or Prometheus' rules",
}
_BENCHES = {
    "serve": "drive a server with prompts, speculation off and on",
    "loop": "run the coordinator over simulated workers",
}
_ENVIRONMENT = {  # read by Ray when it is imported, and by the processes it starts
    "RAY_DEDUP_LOGS": "0",  # progress lines of ranks look alike: show all of them
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported to anybody unless the user wants it
}


def main(arguments: Sequence[str] | None = None, build: "Build | None" = None) -> int:
    """Run one command; returns its exit code. `build` makes the application: null = Outrider's."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser(arguments, build).parse_args(arguments)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        with _stopping_on_signals():
            return int(options.run(options))
    except ConfigError as error:
        return _fail(error, 2)
    except OutriderError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130


def _parser(arguments: Sequence[str], build: "Build | None") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider", description="Speculative serving of large language models on Ray."
    )
    version = metadata.version("outrider")
    parser.add_argument("--version", action="version", version=f"outrider {version}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a configuration file until stopped")
    serve.add_argument("file", metavar="FILE", help="a Ray Serve configuration, see configs/")
    serve.add_argument("--host", help="listen here (default: the file's, else 127.0.0.1)")
    serve.add_argument("--port", type=_port, help="listen here (default: the file's, else 8000)")
    serve.add_argument(
        "--address",
        metavar="RAY",
        help="deploy to this running Ray cluster (default: start a Ray of its own)",
    )
    serve.set_defaults(run=functools.partial(_serve, build=build))

    check = commands.add_parser("check", help="validate a file and show what it would start")
    check.add_argument("file", metavar="FILE")
    check.set_defaults(run=_check)

    for name, purpose in _COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=purpose)
        if list(arguments[:1]) == [name]:
            module = importlib.import_module(f"outrider.deploy.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)

    bench = commands.add_parser("bench", help="measure")
    kinds = bench.add_subparsers(required=True, metavar="KIND")
    for kind, purpose in _BENCHES.items():
        command = kinds.add_parser(kind, help=purpose, description=purpose)
        if list(arguments[:2]) == ["bench", kind]:
            module = importlib.import_module(f"outrider.deploy.bench_{kind}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _serve(options: argparse.Namespace, build: "Build | None") -> int:
    from outrider.deploy.launch import serving

    is_ready = False
    try:
        with serving(
            options.file,
            host=options.host,
            port=options.port,
            address=options.address,
            progress=sys.stdout,
            build=build,
        ) as server:
            is_ready = True
            print(f"Outrider serves {server.model_name} at {server.url}", flush=True)
            threading.Event().wait()
    except KeyboardInterrupt:
        if not is_ready:
            raise
    return 0


def _check(options: argparse.Namespace) -> int:
    from rich.console import Console

    from outrider.deploy.check import check

    check(options.file, Console())
    return 0


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port")
    return port


def _fail(error: Exception, code: int) -> int:
    print("outrider:", one_line(error), file=sys.stderr)
    return code


@contextlib.contextmanager
def _stopping_on_signals() -> Iterator[None]:
    """SIGINT and SIGTERM end the command in good order; a second one ends it at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, _end_now)
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()  # others may set no handlers
    signals = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    before = {each: signal.signal(each, stop) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _end_now(number: int, frame: FrameType | None) -> None:
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(130)
