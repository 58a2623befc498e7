"""`outrider top`: a server's rates in a terminal, over each interval and since its start.

Reads the /metrics that scrapers read: whichever ingress answers, the counts are the coordinator's,
so that differences of two looks are exact; the metrics.port serves it as well.
"""

import argparse
import contextlib
import math
import time
from collections.abc import Callable
from types import TracebackType

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from outrider.cluster.errors import ConfigError, OutriderError, UnavailableError
from outrider.deploy import figures
from outrider.deploy.glance import Counts, Glance, latest, look
from outrider.deploy.metrics import parse
from outrider.deploy.transports import check_status

TIMEOUT_S = 10.0

_NAME, _FIGURE, _BAR = 29, 11, 16  # columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `outrider top`."""
    add = parser.add_argument
    add("url", metavar="URL", help="of the API or of its metrics.port, e.g. http://host:8000")
    add("--interval", type=_seconds, default=2.0, metavar="S", help="between looks; default: 2")
    add("--once", action="store_true", help="print what one interval brought, and end")


def run(options: argparse.Namespace) -> int:
    """Watch until interrupted; or print one frame, which is all that a pipe gets."""
    console = Console()
    with Watch(options.url) as server:
        if options.once or not console.is_terminal:
            server.look()
            time.sleep(options.interval)
            console.print(server.look())
        else:
            with contextlib.suppress(KeyboardInterrupt):  # there is no other end
                _watch(server, options.interval, console)
    return 0


class Watch:
    """Looks at one server, again and again; `with` closes its connection.

    `transport` replaces the network below httpx. Raises ConfigError for what is no URL.
    """

    def __init__(
        self,
        url: str,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = _base(url)
        self._http = httpx.Client(timeout=TIMEOUT_S, transport=transport)
        self._clock = clock
        self._last: tuple[float, Counts] | None = None

    def look(self) -> "Frame":
        """What happened since the look before, and since the start.

        Raises UnavailableError, or what else the server told.
        """
        page, now, last = self._scrape(), self._clock(), self._last
        try:
            model, counts = parse(page)
            recent = None if last is None else look(counts, last[1], now - last[0])
            frame = Frame(model, look(counts), recent)
        except ValueError as error:
            raise UnavailableError(
                f"{self.url}/metrics has no counts of Outrider: {error}"
            ) from error
        self._last = (now, counts)
        return frame

    def _scrape(self) -> str:
        try:
            response = self._http.get(f"{self.url}/metrics")
        except (httpx.HTTPError, UnicodeError) as error:  # the latter for hosts such as a..b
            reason = str(error) or type(error).__name__
            raise UnavailableError(f"cannot reach {self.url}: {reason}") from error
        check_status(response)
        return response.text

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()


class Frame:
    """One look, ready to be printed."""

    def __init__(self, model: str, total: Glance, recent: Glance | None) -> None:
        self._model = _printable(model)
        self._total = total
        self._shown = latest(total, recent)
        self._glances = [total] if recent is None else [recent, total]

    def __rich__(self) -> RenderableType:
        return Group(
            self._head(),
            Text(),
            self._figures(*figures.SPECULATION, *figures.SPEED),
            Text(),
            self._drafts(),
            Text(),
            self._figures(*figures.WASTE, *figures.TROUBLE),
            self._load(),
        )

    def _head(self) -> Text:
        """The model, the rate, and the load."""
        shown = self._shown
        if shown.is_idle:
            rate = "no traffic yet"
        elif shown.acceptance_rate is None:
            rate = f"nothing drafted, {figures.window(shown)}"
        else:
            rate = f"{figures.percent(shown.acceptance_rate)} accepted, {figures.window(shown)}"
        load = ", ".join(f"{say(self._total)} {name}" for name, say in figures.LOAD[:2])
        return Text.assemble(
            (f"{self._model}\n", "bold"), (rate, "bold green"), (f"   {load}", "dim")
        )

    def _figures(self, *rows: figures.Figure) -> Table:
        table = _table()
        table.add_column(min_width=_NAME)
        for glance in self._glances:
            table.add_column(figures.window(glance), justify="right", min_width=_FIGURE)
        for name, say in rows:
            table.add_row(name, *(say(glance) for glance in self._glances))
        return table

    def _drafts(self) -> Table:
        """Acceptance by draft, and under each by position."""
        table = _table()
        table.add_column("accepted", min_width=_NAME)
        table.add_column(figures.window(self._shown), justify="right", min_width=_FIGURE)
        table.add_column()
        table.add_column(no_wrap=True)
        for draft in self._shown.drafts:
            name = Text(_printable(draft.name), "bold")
            rate = draft.acceptance_rate
            table.add_row(name, figures.percent(rate), _bar(rate), figures.living(draft))
            for position, share in enumerate(draft.acceptance_by_position, 1):
                table.add_row(f"  token {position}", figures.percent(share), _bar(share))
        return table

    def _load(self) -> Text:
        return Text(", ".join(f"{name} {say(self._total)}" for name, say in figures.LOAD[2:]))


def _watch(server: Watch, interval_s: float, console: Console) -> None:
    """Show a frame after each interval until interrupted; a server that is away is waited for."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_try(server, interval_s), refresh=True)
            time.sleep(interval_s)


def _try(server: Watch, interval_s: float) -> RenderableType:
    try:
        return server.look()
    except OutriderError as error:
        sentence = _printable(" ".join(str(error).split()))
        return Text(f"{sentence}; trying again every {interval_s:g} s")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time to wait")
    return seconds


def _base(url: str) -> str:
    """The server's URL without what may follow; `host:port` is enough."""
    url = (url if "://" in url else f"http://{url}").rstrip("/")
    for end in ("/v1", "/metrics", "/status"):
        url = url.removesuffix(end)
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url} is no URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{url} is no URL of a server: give http://HOST:PORT")
    return url


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), header_style="dim")


def _bar(share: float | None) -> RenderableType:
    return ProgressBar(
        total=1,
        completed=share or 0,
        width=_BAR,
        style="dim",
        complete_style="green",
        finished_style="green",
    )


def _printable(name: str) -> str:
    """Names come from elsewhere: nothing in them may steer the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)
