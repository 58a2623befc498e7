"""The status page, as HTML and in a real Chromium: readable, escaped, no wider than a phone."""

import copy
import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from outrider.actors.stats import DraftStats, Levels, Pool, Snapshot, Stats
from outrider.cluster.errors import UnavailableError
from outrider.deploy.glance import look, read
from outrider.deploy.ingress import Ingress
from outrider.deploy.routes import build_routes
from outrider.deploy.status_page import render_status, render_trouble

from .fake_coordinator import CharTokenizer, FakeCoordinator
from .http_server import serve_http
from .snapshots import fresh, levels, make_settings, serve

SETTINGS = make_settings()
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")

# Widths at which nothing may stick out, and the least contrast of any text with what is behind it.
MEASURE = """
const view = document.querySelector("iframe").contentWindow, page = view.document;
const parse = text => text.match(/[\\d.]+/g).map(Number);
const light = text => parse(text).slice(0, 3).map(part => part / 255)
  .map(part => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4)
  .reduce((sum, part, i) => sum + part * [.2126, .7152, .0722][i], 0);
const ground = element => {
  const color = view.getComputedStyle(element).backgroundColor;
  return parse(color)[3] === 0 && element.parentElement ? ground(element.parentElement) : color;
};
const contrast = element => {
  const pair = [view.getComputedStyle(element).color, ground(element)].map(light);
  return (Math.max(...pair) + .05) / (Math.min(...pair) + .05);
};
const texts = [...page.body.querySelectorAll("*")].filter(
  element => [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
const rate = page.querySelector(".rate").getBoundingClientRect();
document.body.textContent = JSON.stringify({
  scroll_width: page.documentElement.scrollWidth,
  widest: Math.max(...texts.map(element => element.getBoundingClientRect().right)),
  contrast: Math.min(...texts.map(contrast)),
  ground: light(ground(page.body)),
  rate: page.querySelector(".rate").innerText,
  rate_height: rate.height,
  rate_bottom: rate.bottom,
});
"""


class Clock:
    """Tells the time that a test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def served(num_rounds: int, seed: int = 0) -> Snapshot:
    stats = fresh()
    serve(stats, seed, num_rounds)
    return Snapshot(stats, levels())


def text_of(page: str) -> str:
    """What a page says, without its markup."""
    body = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def client_over(coordinator: FakeCoordinator, clock: Clock) -> httpx.AsyncClient:
    app = build_routes(Ingress(SETTINGS, coordinator, CharTokenizer(), clock))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_the_page_shows_the_last_minute_beside_the_time_since_the_start() -> None:
    coordinator, clock = FakeCoordinator(), Clock()
    coordinator.snapshot = before = served(40)
    after = copy.deepcopy(before)
    serve(after.stats, 1, 60)
    async with client_over(coordinator, clock) as client:
        first = await client.get("/status")
        assert first.headers["content-type"] == "text/html; charset=utf-8"
        assert first.headers["cache-control"] == "no-store"
        coordinator.snapshot, clock.now = after, 40.0
        second = await client.get("/status")
    total = look(read(after))
    recent = look(read(after), read(before), 40)
    assert total.acceptance_rate and recent.acceptance_rate and recent.tokens_per_s
    assert "last" not in text_of(first.text)
    said = text_of(second.text)
    rate = f"{100 * recent.acceptance_rate:.1f} %"
    assert f"Acceptance rate {rate} of drafted tokens accepted, last 40 s" in said
    assert f"({100 * total.acceptance_rate:.1f} % since start)" in said
    assert f"tokens per second {recent.tokens_per_s:.1f} " in said
    assert f"<title>big: {rate} accepted - Outrider</title>" in second.text
    for words in ("3 running, 2 queued", "cache rows 3 of 16", "draft replicas living 4 of 5"):
        assert words in said


async def test_a_lost_target_is_said_first() -> None:
    coordinator, ready = FakeCoordinator(), served(4)
    async with client_over(coordinator, Clock()) as client:
        for is_ready in (True, False):
            levels = replace(ready.levels, is_ready=is_ready)
            coordinator.snapshot = Snapshot(ready.stats, levels)
            said = text_of((await client.get("/status")).text)
            alarm = "2 queued The target is lost, and being rebuilt. Acceptance rate"
            assert (alarm in said) is not is_ready


async def test_scrapes_are_remembered_for_the_page() -> None:
    coordinator, clock = FakeCoordinator(), Clock()
    async with client_over(coordinator, clock) as client:
        await client.get("/metrics")
        clock.now = 15.0
        assert "last 15 s" in (await client.get("/status")).text


async def test_each_ingress_remembers_what_it_saw_itself() -> None:
    coordinator, clock = FakeCoordinator(), Clock()
    async with client_over(coordinator, clock) as one, client_over(coordinator, clock) as other:
        await one.get("/status")
        clock.now = 5.0
        assert "last 5 s" in (await one.get("/status")).text
        assert "last" not in text_of((await other.get("/status")).text)


async def test_every_draft_and_position_has_its_number_beside_its_bar() -> None:
    now = served(200)
    page = render_status("big", look(read(now)), None)
    for draft in look(read(now)).drafts:
        assert draft.name in text_of(page)
        for position, share in enumerate(draft.acceptance_by_position, 1):
            assert f"token {position} {100 * share:.1f} %" in text_of(page)
            assert f"width: {100 * share:.1f}%" in page


async def test_without_traffic_it_says_so() -> None:
    for snapshot in (Snapshot(fresh(), levels()), Snapshot(Stats(), Levels())):
        page = render_status("big", look(read(snapshot)), None)
        assert "no traffic yet" in text_of(page)
        assert not re.search("nan|None|inf", text_of(page), re.IGNORECASE)
    assert "no drafts: plain decoding" in text_of(page)


async def test_a_quiet_minute_shows_the_time_since_the_start() -> None:
    now = read(served(40))
    total = look(now)
    page = text_of(render_status("big", total, look(now, now, 58)))
    assert total.acceptance_rate
    assert f"{100 * total.acceptance_rate:.1f} % of drafted tokens accepted, since start" in page
    assert "(no traffic in the last 58 s)" in page


async def test_plain_traffic_has_no_acceptance_rate() -> None:
    stats = fresh()
    stats.record(0, 0, 1)
    page = render_status("big", look(read(Snapshot(stats, levels()))), None)
    assert "Acceptance rate nothing drafted" in text_of(page)


def hostile() -> tuple[str, Snapshot]:
    """Names that are long, or markup."""
    name = '<script>alert("1")</script>&'
    stats = Stats(drafts={name: DraftStats(), "d" * 64: DraftStats()})
    for draft in stats.drafts.values():
        draft.record("token", 8, 8)
    return f"{name}{'m' * 120}", Snapshot(stats, Levels(pools={name: Pool(64, 63)}))


async def test_names_and_sentences_are_escaped() -> None:
    model, snapshot = hostile()
    page = render_status(model, look(read(snapshot)), None)
    assert "<script" not in page and text_of(page).count('<script>alert("1")</script>&') == 4
    assert "<b>" not in render_trouble("<b>bold</b>")


async def test_a_coordinator_that_is_not_ready_is_a_page_with_a_sentence() -> None:
    coordinator = FakeCoordinator(illness=UnavailableError("the target is <loading>"))
    async with client_over(coordinator, Clock()) as client:
        response = await client.get("/status")
    assert response.status_code == 503
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    said = text_of(response.text)
    assert "Not ready the coordinator is not ready: the target is <loading>" in said


def dump(url: str, folder: Path, *options: str) -> str:
    """The DOM that Chromium made of `url`."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={folder / 'profile'}",
            "--window-size=1400,1000",
            *options,
            "--dump-dom",
            url,
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def full() -> str:
    now = served(4000)
    return render_status("big", look(read(now)), look(read(now), read(served(40)), 58.0))


def strange() -> str:
    model, snapshot = hostile()
    return render_status(model, look(read(snapshot)), None)


def empty() -> str:
    return render_status("big", look(read(Snapshot(fresh(), levels()))), None)


@needs_chromium
@pytest.mark.parametrize("is_dark", [True, False], ids=["dark", "light"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("make", [full, strange, empty])
def test_in_chromium_it_fits_and_can_be_read(
    make: Callable[[], str], width: int, is_dark: bool, tmp_path: Path
) -> None:
    frame = tmp_path / "frame.html"  # a window of Chromium's own is never as narrow as a phone
    frame.write_text(
        f'<!doctype html><iframe style="border: 0; width: {width}px; height: 900px" '
        f'srcdoc="{html.escape(make())}"></iframe>'
        f'<script>window.addEventListener("load", () => {{{MEASURE}}})</script>',
        encoding="utf-8",
    )
    scheme = f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"
    found = re.search(r"\{.*\}", dump(frame.as_uri(), tmp_path, scheme))
    assert found
    seen = json.loads(html.unescape(found[0]))
    assert seen["scroll_width"] <= width and seen["widest"] <= width
    assert seen["contrast"] >= 4.5, "WCAG AA"
    assert (seen["ground"] < 0.1) == is_dark
    assert re.fullmatch(r"\d+\.\d %|no traffic yet", seen["rate"])
    assert seen["rate_height"] >= 32 and seen["rate_bottom"] <= 400, "big, and at the top"


@needs_chromium
def test_chromium_shows_the_page_of_a_server(tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    coordinator.snapshot = now = served(40)
    rate = look(read(now)).acceptance_rate
    assert rate
    with serve_http(build_routes(Ingress(SETTINGS, coordinator, CharTokenizer()))) as url:
        dom = dump(f"{url}/status", tmp_path)
    assert f'<p class="rate">{100 * rate:.1f} %</p>' in dom
