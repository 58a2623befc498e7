"""The docs say what is: their links lead somewhere, and the settings, flags and counters exist."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
from pydantic import BaseModel

from outrider.cluster.config import (
    DecodingSpec,
    DraftModelSpec,
    MetricsSpec,
    PromptLookupSpec,
    Settings,
    TargetSpec,
    TimeoutsSpec,
)
from outrider.deploy.cli import _parser
from outrider.deploy.schema import ChatBody, CompletionBody

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, *DOCS]
SECTIONS: dict[str, tuple[type[BaseModel], ...]] = {
    "target": (TargetSpec,),
    "drafts[]": (PromptLookupSpec, DraftModelSpec),
    "decoding": (DecodingSpec,),
    "metrics": (MetricsSpec,),
    "timeouts": (TimeoutsSpec,),
}
ALERTS = (
    "OutriderAcceptanceCollapsed",
    "OutriderDraftSlowsDown",
    "OutriderSlowerThanPlain",
    "OutriderDraftsGone",
    "OutriderQueueFull",
    "OutriderTargetLost",
    "OutriderGone",
)


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", read(page), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def spans(page: Path) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in re.findall(r"^ *```bash\n(.*?)^ *```$", read(page), re.MULTILINE | re.DOTALL):
            for line in re.findall(r"(?:^|&& )\s*outrider (.+)$", block, re.MULTILINE):
                found.append((page.name, line))
    return found


def comments() -> list[tuple[str, str]]:
    """Commands in the heads of the example files."""
    paths = sorted((ROOT / "configs").rglob("*.yaml"))
    lines = ((p.name, re.findall(r"^#   outrider (.+)$", read(p), re.MULTILINE)) for p in paths)
    return [(name, line) for name, found in lines for line in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    for link in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", read(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_links_to_every_page() -> None:
    for page in DOCS:
        assert f"](docs/{page.name})" in read(README)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_settings_that_are_named_exist(page: Path) -> None:
    for section, name in re.findall(
        r"`(target|drafts\[\]|decoding|metrics|timeouts)\.(\w+)", prose(page)
    ):
        assert any(name in spec.model_fields for spec in SECTIONS[section]), f"{section}.{name}"
    known = {name for specs in SECTIONS.values() for spec in specs for name in spec.model_fields}
    known |= set(Settings.model_fields)
    known |= set(CompletionBody.model_fields) | set(ChatBody.model_fields)
    for span in spans(page):  # `name: value`, as it stands in a file or a request
        if setting := re.fullmatch(r"([\w.\[\]]+): \S.*", span):
            name = setting[1].rsplit(".")[-1]
            assert name in known or name == "ray", span


@pytest.mark.parametrize(("place", "command"), commands() + comments())
def test_commands_that_are_shown_are_understood(place: str, command: str) -> None:
    arguments = shlex.split(command, comments=True)
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            _parser(arguments, None).parse_args(arguments)
        except SystemExit:
            pytest.fail(f"{place}: outrider {command}: {errors.getvalue()}")
    for argument in arguments:
        if argument.startswith("configs/"):
            assert (ROOT / argument).exists(), f"{place}: {argument}"


def test_counters_that_are_named_are_in_the_readme() -> None:
    defined = set(re.findall(r"\boutrider_\w+", read(README)))
    stems = set(re.findall(r"`\.\.\.(_\w+)`", read(README)))  # said after the first of their kind
    defined |= {f"outrider_spec_decode{stem}" for stem in stems}
    named = {name for page in DOCS for name in re.findall(r"\boutrider_\w+", read(page))}
    assert named and named <= defined, named - defined


def test_every_alert_has_its_paragraph() -> None:
    operating = ROOT / "docs" / "operating.md"
    assert {alert.lower() for alert in ALERTS} <= anchors(operating)
    paragraphs = re.split(r"^### ", read(operating), flags=re.MULTILINE)[1:]
    assert [paragraph.partition("\n")[0] for paragraph in paragraphs] == list(ALERTS)


def test_nothing_is_left_to_fill_in() -> None:
    for page in DOCS:
        assert not re.search(r"TODO|TBD|FIXME|XXX", read(page)), page.name
