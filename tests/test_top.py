"""`outrider top`: frames of scraped pages, patience with a server that is away, exit codes."""

import io
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import httpx
import pytest
from rich.console import Console

from outrider.actors.stats import Snapshot
from outrider.cluster.errors import ConfigError, UnavailableError
from outrider.deploy.cli import main
from outrider.deploy.ingress import Ingress
from outrider.deploy.metrics import render, serve_metrics
from outrider.deploy.routes import build_routes
from outrider.deploy.top import Watch

from .fake_coordinator import CharTokenizer, FakeCoordinator
from .http_server import serve_http
from .snapshots import fresh, levels, make_settings, snapshot

SETTINGS = make_settings()


class Server(httpx.BaseTransport):
    """Answers each scrape with the next page; time is what a test says."""

    def __init__(self, *pages: bytes | Exception | httpx.Response) -> None:
        self.pages = list(pages)
        self.now = 0.0
        self.asked: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(str(request.url))
        page = self.pages.pop(0)
        if isinstance(page, Exception):
            raise page
        return page if isinstance(page, httpx.Response) else httpx.Response(200, content=page)

    def watch(self, url: str = "host:8000") -> Watch:
        return Watch(url, self, lambda: self.now)


def page(*blocks: tuple[int, int]) -> bytes:
    """Of a coordinator whose draft "small" had these blocks verified."""
    stats = fresh()
    for drafted, accepted in blocks:
        stats.drafts["small"].record("token", drafted, accepted)
        stats.record(drafted, accepted, accepted + 1)
    return render(SETTINGS, Snapshot(stats, levels()))


def printed(frame: object, width: int = 80) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(frame)
    return console.export_text().splitlines()


def line(lines: list[str], name: str) -> list[str]:
    (found,) = (line.split() for line in lines if line.strip().startswith(name))
    return found


def test_a_frame_tells_the_rates_of_the_interval_and_since_the_start() -> None:
    server = Server(page((4, 4)), page((4, 4), (4, 1), (4, 0)))
    watch = server.watch()
    first = printed(watch.look())
    assert line(first, "acceptance rate") == ["acceptance", "rate", "100.0", "%"]
    server.now = 2.0
    lines = printed(watch.look())
    assert lines[0] == "big"
    assert lines[1] == "12.5 % accepted, last 2 s   3 running, 2 queued"
    assert line(lines, "acceptance rate")[2:] == ["12.5", "%", "41.7", "%"]
    assert line(lines, "mean acceptance length")[3:] == ["1.50", "2.67"]
    assert line(lines, "tokens per second  ")[3:] == ["1.5", "-"]
    assert line(lines, "tokens emitted")[2:] == ["3", "8"]
    assert line(lines, "small")[:3] == ["small", "12.5", "%"]
    assert line(lines, "small")[-4:] == ["3", "of", "4", "living"]
    assert line(lines, "token 1")[:4] == ["token", "1", "50.0", "%"]
    assert line(lines, "token 2")[:4] == ["token", "2", "0.0", "%"]
    assert max(map(len, lines)) <= 80


def test_an_interval_without_traffic_shows_the_rate_since_the_start() -> None:
    server = Server(page((4, 2)), page((4, 2)))
    watch = server.watch()
    watch.look()
    server.now = 2.0
    assert printed(watch.look())[1].startswith("50.0 % accepted, since start")
    assert printed(Server(page()).watch().look())[1].startswith("no traffic yet")


def test_names_cannot_steer_the_terminal() -> None:
    settings = SETTINGS.model_copy(update={"model_name": "[red]big\x1b[2J"})
    frame = Server(render(settings, snapshot())).watch().look()
    assert printed(frame)[0] == "[red]big?[2J"


@pytest.mark.parametrize(
    "url", ["host:8000", "http://host:8000/", "http://host:8000/v1", "host:8000/metrics"]
)
def test_every_way_to_name_a_server_is_understood(url: str) -> None:
    server = Server(page())
    server.watch(url).look()
    assert server.asked == ["http://host:8000/metrics"]


@pytest.mark.parametrize("url", ["", "http://", "ftp://host", "http://host:port"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="no URL"):
        Watch(url)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.ConnectError("refused"), "cannot reach http://host:8000: refused"),
        (httpx.Response(200, text="<!doctype html>"), "has no counts of Outrider"),
        (httpx.Response(200, text="up 1\n"), "has no counts of Outrider"),
        (httpx.Response(503, json={"error": {"message": "loading"}}), "^loading$"),
    ],
)
def test_a_server_that_says_nothing_is_told_in_a_sentence(
    answer: Exception | httpx.Response, words: str
) -> None:
    with pytest.raises(UnavailableError, match=words):
        Server(answer).watch().look()


def test_once_prints_one_frame(capsys: pytest.CaptureFixture[str]) -> None:
    coordinator = FakeCoordinator()
    coordinator.snapshot = snapshot()
    ingress = Ingress(SETTINGS, coordinator, CharTokenizer())
    with serve_http(build_routes(ingress)) as url:
        assert main(["top", url, "--once", "--interval", "0.1"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("big\n") and out.count("acceptance rate") == 1 and "\x1b" not in out
        assert main(["top", url, "--interval", "0.1"]) == 0, "not a terminal"
        assert capsys.readouterr().out.count("acceptance rate") == 1


def test_once_without_a_server_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert main(["top", f"127.0.0.1:{port}", "--once"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith(f"outrider: cannot reach http://127.0.0.1:{port}: ")


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "soon"])
def test_a_wrong_interval_is_exit_code_2(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["top", "host", "--interval", interval])
    assert "--interval" in capsys.readouterr().err


def read_until(terminal: int, is_there: Callable[[bytes], bool], seconds: float = 60) -> bytes:
    """What a terminal shows, until it is there."""
    shown, deadline = b"", time.monotonic() + seconds
    while not is_there(shown):
        assert time.monotonic() < deadline, shown
        shown += os.read(terminal, 65536)
    return shown


def test_in_a_terminal_it_waits_for_the_server_and_leaves_the_screen_as_it_was() -> None:
    coordinator = FakeCoordinator(illness=UnavailableError("the target is loading"))
    coordinator.snapshot = snapshot()
    app = build_routes(Ingress(SETTINGS, coordinator, CharTokenizer()))
    with serve_http(app) as url:
        terminal, its_side = pty.openpty()
        command = "import sys; from outrider.deploy.cli import main; sys.exit(main())"
        process = subprocess.Popen(
            [sys.executable, "-c", command, "top", url, "--interval", "0.2"],
            stdin=its_side,
            stdout=its_side,
            stderr=its_side,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
        )
        os.close(its_side)
        try:
            words = b"the target is loading; trying again every 0.2 s"
            shown = read_until(terminal, lambda shown: shown.count(words) >= 2)
            assert b"acceptance rate" not in shown
            coordinator.illness = None
            read_until(terminal, lambda shown: shown.count(b"acceptance rate") >= 2)
            process.send_signal(signal.SIGINT)
            left = read_until(terminal, lambda shown: b"\x1b[?1049l" in shown)
            assert b"\x1b[?25h" in left, "the cursor is back"
            assert b"Traceback" not in left
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
            os.close(terminal)


def test_it_reads_a_metrics_port_too() -> None:
    server = serve_metrics(make_settings(port=0), snapshot)
    assert server is not None
    try:
        with Watch(f"127.0.0.1:{server.port}") as watch:
            assert printed(watch.look())[0] == "big"
    finally:
        server.close()
