"""`outrider top`: frames of scraped pages, patience with a server that is away, exit codes."""

import io
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.screen import Screen

from outrider.actors.stats import DraftStats, Levels, Pool, Snapshot, Stats
from outrider.cluster.config import parse_settings
from outrider.cluster.errors import ConfigError, UnavailableError
from outrider.deploy import figures
from outrider.deploy.cli import main
from outrider.deploy.ingress import Ingress
from outrider.deploy.large_print import enlarge
from outrider.deploy.metrics import render, serve_metrics
from outrider.deploy.routes import build_routes
from outrider.deploy.top import Fitted, Watch

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


def scraped(drafts: dict[str, int], model: str = "big", times: int = 1) -> bytes:
    """Of a coordinator whose drafts had blocks of these lengths verified: half is accepted."""
    settings = parse_settings(
        {
            "model_name": model,
            "target": {"model": "org/big"},
            "drafts": [
                {"method": "prompt_lookup", "name": name, "num_speculative_tokens": length}
                for name, length in drafts.items()
            ],
        }
    )
    stats = Stats(rejected=7, drafts={name: DraftStats() for name in drafts})
    for name, length in drafts.items():
        for accepted in [*range(length + 1)] * times:
            stats.drafts[name].record("prompt_lookup", length, accepted)
            stats.record(length, accepted, accepted + 1)
    pools = {name: Pool(12, 11) for name in drafts}
    return render(settings, Snapshot(stats, Levels(running=3, rows=16, pools=pools)))


def printed(frame: object, width: int = 80) -> list[str]:
    """What a pipe gets."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(frame)
    return console.export_text().splitlines()


def shown(page: bytes, width: int, height: int, before: bytes | None = None) -> list[str]:
    """The lines of a terminal's screen."""
    terminal = Console(
        width=width, height=height, force_terminal=True, record=True, file=io.StringIO()
    )
    server = Server(before or page, page)
    watch = server.watch()
    watch.look()
    server.now = 2.0
    terminal.print(Screen(Fitted(watch.look())))
    lines = terminal.export_text().split("\n")[:height]
    assert all(cell_len(line) <= width for line in lines)
    return lines


def line(lines: list[str], name: str) -> list[str]:
    (found,) = (line.split() for line in lines if line.strip().startswith(name))
    return found


def test_a_frame_tells_the_rates_of_the_interval_and_since_the_start() -> None:
    server = Server(page((4, 4)), page((4, 4), (4, 1), (4, 0)))
    watch = server.watch()
    assert printed(watch.look())[1] == "acceptance rate 100.0 %, since start"
    server.now = 2.0
    lines = printed(watch.look())
    assert lines[:4] == [
        "big",
        "acceptance rate 12.5 %, last 2 s (41.7 % since start)",
        "mean acceptance length 1.50 (2.67 since start)",
        "running 3, queued 2, cache rows 3 of 16, draft replicas living 4 of 5",
    ]
    assert line(lines, "tokens per second  ")[3:] == ["1.5", "-"]
    assert line(lines, "tokens emitted")[2:] == ["3", "8"]
    small = lines.index("accepted, last 2 s") + 2
    assert lines[small - 1].split() == ["lookup", "-"]
    assert lines[small].split() == ["small", "12.5", "%"]
    assert lines[small + 1].split() == ["3", "of", "4", "living"]
    assert line(lines, "token 1")[-2:] == ["50.0", "%"]
    assert line(lines, "token 2")[-2:] == ["0.0", "%"]
    assert max(map(len, lines)) <= 80


def test_a_draft_of_four_tokens_fits_a_terminal_of_80_by_24() -> None:
    before = scraped({"small": 4})
    lines = shown(scraped({"small": 4}, times=1000), 80, 24, before)
    text = "\n".join(lines)
    for line_of_rate, part in zip(lines, enlarge("50.0 %").splitlines(), strict=False):
        assert line_of_rate.startswith(part), "large"
    words = [name for name, _ in (*figures.SPECULATION, *figures.SPEED, *figures.WASTE)]
    words += [name for name, _ in (*figures.TROUBLE, *figures.LOAD)]
    words += [
        "big",
        "last 2 s (50.0 % since start)",
        "11 of 12 living",
        *(f"token {position}" for position in range(1, 5)),
    ]
    assert [word for word in words if word not in text] == []
    assert "more lines" not in text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (120, 40), (40, 12), (20, 5)])
@pytest.mark.parametrize(
    "drafts", [{}, {"small": 4}, {"one": 8, "two": 8}, {f"draft {i}": 64 for i in range(4)}]
)
def test_what_does_not_fit_a_terminal_is_told_and_comes_last(
    drafts: dict[str, int], width: int, height: int
) -> None:
    page = scraped(drafts)
    lines = [line.rstrip() for line in shown(page, width, height)]
    everything = "\n".join(line.rstrip() for line in shown(page, width, 1000)).rstrip().split("\n")
    if len(everything) <= height:
        assert "\n".join(lines).rstrip().split("\n") == everything
    else:
        assert lines[:-1] == everything[: height - 1]
        assert lines[-1].startswith(f"{len(everything) - height + 1} more lines")


def test_of_many_drafts_only_positions_are_cut() -> None:
    drafts = {f"draft {number}": 64 for number in range(1, 9)}
    text = "\n".join(shown(scraped(drafts), 80, 24))
    assert "more lines: make the terminal taller" in text
    for name, _ in (*figures.TROUBLE, *figures.LOAD, *figures.SPEED, *figures.WASTE):
        assert name in text
    assert all(name in text for name in drafts)


def test_long_and_odd_names_are_shortened_and_break_nothing() -> None:
    wide = "\N{CJK UNIFIED IDEOGRAPH-4E00}" * 64
    drafts = {"d" * 64: 4, wide: 4, "e\N{COMBINING ACUTE ACCENT}\n\t\u202e[red]": 4}
    for width, height in ((80, 24), (60, 20), (120, 40), (20, 5)):
        lines = shown(scraped(drafts, "m" * 500), width, height)
        assert lines[0].rstrip().endswith("m…")
    assert any(
        "e\N{COMBINING ACUTE ACCENT}???[red]" in each for each in shown(scraped(drafts), 120, 40)
    )


def test_without_colours_or_large_letters_it_says_the_same() -> None:
    page = scraped({"small": 4})
    monochrome = Console(
        width=80, height=24, force_terminal=True, no_color=True, file=io.StringIO()
    )
    monochrome.print(Fitted(Server(page).watch().look()))
    assert isinstance(monochrome.file, io.StringIO)
    said = monochrome.file.getvalue()
    assert not re.search(r"\x1b\[[\d;]*3\dm", said) and "11 of 12 living" in said
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(width=80, force_terminal=True, file=ascii_only).print(Server(page).watch().look())
    ascii_only.seek(0)
    assert "acceptance rate 50.0 %, since start" in ascii_only.read()


def test_an_interval_without_traffic_shows_the_rate_since_the_start() -> None:
    server = Server(page((4, 2)), page((4, 2)))
    watch = server.watch()
    watch.look()
    server.now = 2.0
    assert printed(watch.look())[1] == "acceptance rate 50.0 %, since start"
    assert printed(Server(page()).watch().look())[1].startswith("no traffic yet")


def test_names_cannot_steer_the_terminal() -> None:
    settings = SETTINGS.model_copy(update={"model_name": "[red]big\x1b[2J"})
    frame = Server(render(settings, snapshot())).watch().look()
    assert printed(frame)[0] == "[red]big?[2J"


def edited(pattern: str, replacement: str) -> httpx.Response:
    """A page of which something is changed."""
    text, changes = re.subn(pattern, replacement, page((4, 2)).decode())
    assert changes
    return httpx.Response(200, text=text)


def test_a_lost_target_is_the_first_thing_that_is_said() -> None:
    assert figures.LOST not in "\n".join(shown(page((4, 2)), 80, 24))
    lost = edited(r"outrider_target_ready(.*) 1.0", r"outrider_target_ready\1 0.0").content
    lines = shown(lost, 80, 24)
    assert f"{figures.LOST}: big" in lines[0]
    assert "more lines" not in "\n".join(lines)


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
        (UnicodeError("label empty"), "cannot reach http://host:8000: label empty"),
        (httpx.Response(200, text="<!doctype html>"), "has no counts of Outrider"),
        (httpx.Response(200, text="up 1\n"), "has no counts of Outrider"),
        (edited(r"(rounds_total\S+) .*", r"\1 NaN"), "outrider_rounds_total is nan$"),
        (edited(r"(rounds_total\S+) .*", r"\1 +Inf"), "outrider_rounds_total is inf$"),
        (edited(r"(rounds_total\S+) .*", r"\1 1e308"), "outrider_rounds_total is 1e\\+308$"),
        (edited(r"(rounds_total\S+) .*", r"\1 -1"), "outrider_rounds_total is -1$"),
        (edited(r"(rounds_total\S+) .*", r"\1 0.5"), "outrider_rounds_total is 0.5$"),
        (edited(r'draft="small",', ""), "has no label 'draft'$"),
        (edited(r'position="1"', 'position="x"'), "has no counts of Outrider"),
        (edited(r'le="0.1"', 'le="0.11"'), "has other bounds than ours$"),
        (edited(r'(le="0.1",\S+) .*', r"\1 NaN"), "_bucket is nan$"),
        (edited(r'(le="0.1",\S+) .*', r"\1 99"), "the buckets of .* do not add up$"),
        (httpx.Response(503, json={"error": {"message": "loading"}}), "^loading$"),
    ],
)
def test_a_server_that_says_nothing_is_told_in_a_sentence(
    answer: Exception | httpx.Response, words: str
) -> None:
    with pytest.raises(UnavailableError, match=words):
        Server(answer).watch().look()


def test_positions_without_blocks_are_no_rates() -> None:
    lines = printed(Server(edited(r"(num_drafts_total\S+) .*", r"\1 0")).watch().look())
    assert lines[1] == "acceptance rate 50.0 %, since start"
    assert not any(each.startswith("token ") for each in lines)


PIECES = st.sampled_from(
    [
        *("NaN", "+Inf", "-Inf", "-1", "0", "0.5", "1e308", "5e-324", "1_0", "9" * 5000, "x", "é"),
        *('"', "\\", "\n", "#", "=", ",", "{", "}", " ", "", "\x00", "\u2028"),
        "# TYPE outrider_rounds_total gauge\n",
    ]
)
PAGE = scraped({"small": 4}).decode()
CUTS = st.tuples(st.integers(0, len(PAGE)), st.sampled_from([0, 1, 2, 5, 20, 2000]), PIECES)


@settings(max_examples=100)
@given(st.lists(CUTS, min_size=1, max_size=6))
def test_whatever_a_page_says_it_is_shown_or_refused_in_one_sentence(
    cuts: list[tuple[int, int, str]],
) -> None:
    text = PAGE
    for start, length, piece in cuts:
        text = text[:start] + piece + text[start + length :]
    watch = Server(PAGE.encode(), text.encode()).watch()
    watch.look()
    try:
        frame = watch.look()
    except UnavailableError as error:
        assert "http://host:8000/metrics has no counts of Outrider: " in str(error)
    else:
        assert printed(frame)


class Endless(httpx.SyncByteStream):
    """A body that never ends."""

    def __init__(self, part: bytes, server: Server | None = None) -> None:
        self.part = part
        self.server = server

    def __iter__(self) -> Iterator[bytes]:
        while True:
            if self.server is not None:
                self.server.now += 1
            yield self.part


def test_a_page_without_end_is_given_up_by_size_and_by_time() -> None:
    server = Server()
    server.pages = [
        httpx.Response(200, stream=Endless(b"x" * 2**20)),
        httpx.Response(200, stream=Endless(b"x", server)),
    ]
    for _ in range(2):
        with pytest.raises(UnavailableError, match="does not come to an end"):
            server.watch().look()


def test_what_charset_a_server_claims_does_not_matter() -> None:
    for charset in ("utf-16", "rot13", "none"):
        headers = {"content-type": f"text/plain; charset={charset}"}
        server = Server(httpx.Response(200, content=page((4, 2)), headers=headers))
        server.watch().look()


def test_a_page_that_cannot_be_read_leaves_the_interval_open() -> None:
    server = Server(page((4, 4)), b"up 1\n", page((4, 4), (4, 0)))
    watch = server.watch()
    watch.look()
    with pytest.raises(UnavailableError):
        watch.look()
    server.now = 4.0
    assert printed(watch.look())[1] == "acceptance rate 0.0 %, last 4 s (50.0 % since start)"


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


def test_letters_that_a_terminal_has_not_are_question_marks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    coordinator = FakeCoordinator()
    named = SETTINGS.model_copy(update={"model_name": "modèle" * 50})
    with serve_http(build_routes(Ingress(named, coordinator, CharTokenizer()))) as url:
        assert main(["top", url, "--once", "--interval", "0.1"]) == 0
    out.seek(0)
    assert out.readline().startswith("mod?lemod?le")


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
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
        )
        os.close(its_side)
        try:
            words = b"the target is loading; trying again every 0.2 s"
            shown = read_until(terminal, lambda shown: shown.count(words) >= 2)
            assert b"acceptance rate" not in shown
            coordinator.illness = None
            shown = read_until(terminal, lambda shown: shown.count(b"acceptance rate") >= 2)
            assert b"tokens cut by stop rules" in shown, "the last line"
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
