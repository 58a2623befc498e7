"""The README says what is: every setting, every served field, and the commands that CI runs."""

import re
from pathlib import Path

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
from outrider.deploy.schema import ChatBody, CompletionBody

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_setting_is_in_the_table() -> None:
    table = README[README.index("### Configuration") : README.index("### Verification")]
    kinds: list[type[BaseModel]] = [
        TargetSpec,
        PromptLookupSpec,
        DraftModelSpec,
        DecodingSpec,
        MetricsSpec,
        TimeoutsSpec,
    ]
    names = {name for kind in kinds for name in kind.model_fields} | {"model_name", "seed"}
    missing = {name for name in names if not re.search(rf"\b{name}\b", table)}
    assert not missing
    assert set(Settings.model_fields) == {
        "model_name",
        "target",
        "drafts",
        "decoding",
        "seed",
        "metrics",
        "timeouts",
    }, "a new section of the settings needs its lines in the README"


def test_every_served_field_is_named() -> None:
    section = README[README.index("### HTTP API") : README.index("### Python clients")]
    names = set(CompletionBody.model_fields) | set(ChatBody.model_fields)
    missing = {name for name in names if not re.search(rf"\b{name}\b", section)}
    assert not missing


def test_ci_finds_the_test_command_of_the_readme() -> None:
    (command,) = re.findall(r"<!-- tests -->\n```bash\n(.+)\n```", README)
    assert command.startswith("pip install ") and command.endswith("&& pytest")


def test_files_that_the_readme_links_to_exist() -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_nothing_is_left_to_fill_in() -> None:
    assert not re.search(r"@[A-Z]+@|TODO|TBD", README)
