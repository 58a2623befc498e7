"""`outrider top`: a server's rates in a terminal, over each interval and since its start.

Reads the /metrics that scrapers read: whichever ingress answers, the counts are the coordinator's,
so that differences of two looks are exact; the metrics.port serves it as well. What matters most
comes first, so that a terminal that is too small cuts the positions of drafts; it says so.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from io import TextIOWrapper
from types import TracebackType

import httpx
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from outrider.cluster.errors import ConfigError, OutriderError, UnavailableError
from outrider.deploy import figures
from outrider.deploy.glance import Counts, Glance, latest, look
from outrider.deploy.large_print import enlarge
from outrider.deploy.metrics import parse
from outrider.deploy.terminal import one_line, printable
from outrider.deploy.transports import check_status

TIMEOUT_S = 10.0
_MOST_BYTES = 2**24
_LONGEST_S = 86_400.0

_NAME, _FIGURE = 29, 9  # columns of the table of figures, at least
_DRAFTS = 60  # columns of what is told of drafts, at most
_LARGE, _BOTH = 70, 80  # columns of a terminal with room for large print, for both side by side


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `outrider top`."""
    add = parser.add_argument
    add("url", metavar="URL", help="of the API or of its metrics.port, e.g. http://host:8000")
    add("--interval", type=_seconds, default=2.0, metavar="S", help="between looks; default: 2")
    add("--once", action="store_true", help="print what one interval brought, and end")


def run(options: argparse.Namespace) -> int:
    """Watch until interrupted; or print one frame, which is all that a pipe gets."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal has every name's letters
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
        page, begin = bytearray(), self._clock()
        try:
            with self._http.stream("GET", f"{self.url}/metrics") as response:
                for part in response.iter_bytes():
                    page += part
                    if len(page) > _MOST_BYTES or self._clock() - begin > TIMEOUT_S:
                        raise UnavailableError(f"{self.url}/metrics does not come to an end")
        except (httpx.HTTPError, UnicodeError) as error:  # the latter for hosts such as a..b
            reason = str(error) or type(error).__name__
            raise UnavailableError(f"cannot reach {self.url}: {reason}") from error
        text = page.decode("utf-8", "replace")
        check_status(httpx.Response(response.status_code, text=text))
        return text

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
    """One look, ready to be printed; in large print and two columns where a terminal has room."""

    def __init__(self, model: str, total: Glance, recent: Glance | None) -> None:
        self._model = printable(model)
        self._total = total
        self._shown = latest(total, recent)
        self._glances = [total] if recent is None else [recent, total]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width if console.is_terminal else 0  # a pipe gets plain lines
        yield self._head(is_large=width >= _LARGE and not options.ascii_only)
        if width >= _BOTH:
            yield _beside(self._figures(), self._drafts())
        else:
            yield self._figures()
            yield self._drafts()

    def _head(self, *, is_large: bool) -> RenderableType:
        """The model, the rate, and the load."""
        shown, rate = self._shown, ""
        if shown.is_idle:
            words = "no traffic yet"
        elif shown.acceptance_rate is None:
            words = f"nothing drafted, {figures.window(shown)}"
        else:
            rate = figures.percent(shown.acceptance_rate)
            words = f"acceptance rate{'' if is_large else f' {rate}'}, {figures.window(shown)}"
            words += self._since_start(figures.percent(self._total.acceptance_rate))
            length, total = (
                figures.decimal(each.mean_acceptance_length) for each in (shown, self._total)
            )
            words += f"\nmean acceptance length {length}{self._since_start(total)}"
        name = _line(self._model, "bold")
        if not self._total.is_ready:
            name = _line(f"{figures.LOST}: {self._model}", "bold red")
        lines = Group(name, Text(words, "bold green"))
        load = Text(", ".join(f"{name} {say(self._total)}" for name, say in figures.LOAD))
        if is_large and rate:
            return Group(_beside(_line(enlarge(rate), "bold green"), lines), load)
        return Group(lines, load)

    def _since_start(self, figure: str) -> str:
        return "" if self._shown is self._total else f" ({figure} since start)"

    def _figures(self) -> Table:
        """What is wrong, the speed, and wasted work."""
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(min_width=_NAME)
        for _ in self._glances:
            table.add_column(justify="right", min_width=_FIGURE)
        table.add_row("trouble", *map(figures.window, self._glances), style="bold")
        for name, say in figures.TROUBLE:
            said = [say(glance) for glance in self._glances]
            style = "dim" if said[-1] == "0" else "" if said[0] == "0" else "bold red"
            table.add_row(name, *said, style=style)
        for title, rows in (
            ("speed", (*figures.SPECULATION[2:], *figures.SPEED)),  # the others are in the head
            ("wasted work", figures.WASTE),
        ):
            table.add_row(title, style="bold")
            for name, say in rows:
                table.add_row(name, *map(say, self._glances))
        return table

    def _drafts(self) -> RenderableType:
        """Acceptance by draft, then of each by position."""
        drafts = self._shown.drafts
        if not drafts:
            return Text("no drafts: plain decoding")
        title = _line(f"accepted, {figures.window(self._shown)}", "bold")
        rates, positions = _shares(), _shares()
        for draft in drafts:
            name = _line(printable(draft.name))
            rates.add_row(name, figures.percent(draft.acceptance_rate))
            if draft.living < draft.replicas:
                rates.add_row(f"  {figures.living(draft)}", style="bold red")
            if len(drafts) > 1 and draft.acceptance_by_position:
                positions.add_row(name, style="bold")
            for position, share in enumerate(draft.acceptance_by_position, 1):
                bar = _beside(Text(f"token {position:<2}"), _bar(share), gap=1)
                positions.add_row(bar, figures.percent(share))
        return Constrain(Group(title, rates, positions), _DRAFTS)


class Fitted:
    """A frame, cut to the height of the terminal with a last line that says so."""

    def __init__(self, frame: RenderableType) -> None:
        self._frame = frame

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._frame, options.update(height=None))
        more = len(lines) - options.size.height
        if more > 0:
            lines = lines[: -more - 1]
        for line in lines:
            yield from line
            yield Segment.line()
        if more > 0:
            yield _line(f"{more + 1} more lines: make the terminal taller", "reverse")


def _watch(server: Watch, interval_s: float, console: Console) -> None:
    """Show a frame after each interval until interrupted; a server that is away is waited for."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(Fitted(_try(server, interval_s)), refresh=True)
            time.sleep(interval_s)


def _try(server: Watch, interval_s: float) -> RenderableType:
    try:
        return server.look()
    except OutriderError as error:
        return Text(f"{one_line(error)}; trying again every {interval_s:g} s")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= _LONGEST_S:
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


def _beside(left: RenderableType, right: RenderableType, gap: int = 3) -> Table:
    """Both, the right one as wide as there is room."""
    table = Table.grid(padding=(0, gap, 0, 0), pad_edge=False, expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_row(left, right)
    return table


def _shares() -> Table:
    """For lines that end with a percentage."""
    table = Table.grid(padding=(0, 1, 0, 0), pad_edge=False, expand=True)
    table.add_column(ratio=1)
    table.add_column(justify="right", no_wrap=True)
    return table


def _line(text: str, style: str = "") -> Text:
    """Text whose lines are shortened rather than wrapped."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _bar(share: float) -> ProgressBar:
    return ProgressBar(
        total=1, completed=share, style="dim", complete_style="green", finished_style="green"
    )
