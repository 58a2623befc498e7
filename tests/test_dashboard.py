"""Dashboard and rules: made of the instruments, and such as Grafana and Prometheus take."""

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.deploy.cli import main
from outrider.deploy.dashboard import make_dashboard
from outrider.deploy.instruments import INSTRUMENTS
from outrider.deploy.promql import Queries
from outrider.deploy.rules import make_rules

from .queries import PREFIXES, panel_queries, panels, rule_queries, rules

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "configs" / "grafana" / "dashboards" / "outrider.json"
RULES = ROOT / "configs" / "prometheus" / "rules.yml"
RULES_TEST = ROOT / "tests" / "rules_test.yml"
KINDS = {"timeseries", "stat", "bargauge", "heatmap", "table"}
PROMTOOL = shutil.which("promtool")
with_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)"
)
for_both = pytest.mark.parametrize("prefix", PREFIXES, ids=("ray", "plain"))


def promtool(*arguments: str | Path) -> None:
    assert PROMTOOL is not None
    command = [PROMTOOL, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def names(query: str) -> set[str]:
    """Names of ours in a query."""
    return set(re.findall(r"\b(?:ray_)?outrider_\w+", re.sub(r"\bmodel\w*:\S+", "", query)))


def test_the_committed_files_are_what_the_command_writes(tmp_path: Path) -> None:
    for options, committed in (([], DASHBOARD), (["--rules"], RULES)):
        made = tmp_path / committed.name
        assert main(["dashboard", *options, "--output", str(made)]) == 0
        assert made.read_bytes() == committed.read_bytes(), f"outrider dashboard {options}"


def test_the_command_prints_without_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", "--prefix", ""]) == 0
    assert capsys.readouterr().out == make_dashboard("")
    assert main(["dashboard", "--prefix", "", "--rules"]) == 0
    assert capsys.readouterr().out == make_rules("")


def test_a_file_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboard", "--output", str(tmp_path / "none" / "x.json")]) == 2
    assert re.fullmatch(r"outrider: --output .*x.json: .+\n", capsys.readouterr().err)


@for_both
def test_every_name_is_an_instruments_and_every_instrument_is_in_a_panel(prefix: str) -> None:
    parts = {"counter": [""], "gauge": [""], "histogram": ["_bucket", "_count"]}
    known = {f"{prefix}{i.series}{part}": i for i in INSTRUMENTS for part in parts[i.kind]}
    shown = set.union(*(names(query) for _, query in panel_queries(prefix)))
    assert shown == set(known)
    used = set.union(*(names(query) for _, query in rule_queries(prefix)))
    assert used <= set(known)


@for_both
def test_counters_are_rated_before_they_are_added_up(prefix: str) -> None:
    """A sum of counters falls when a coordinator comes back, and its rate would jump."""
    for _, query in (*panel_queries(prefix), *rule_queries(prefix)):
        assert not re.search(r"(rate|increase)\((?!(?:ray_)?outrider_\w+[^()]*\[[^()]*\]\))", query)


@for_both
def test_every_denominator_is_guarded(prefix: str) -> None:
    for title, query in (*panel_queries(prefix), *rule_queries(prefix)):
        for _, rest in ((m, query[m.end() :]) for m in re.finditer(r" / ", query)):
            denominator = re.sub(r"^on \([^)]*\) group_left \(\) ", "", rest)
            depth = list(itertools.accumulate({"(": 1, ")": -1}.get(c, 0) for c in denominator))
            whole = denominator[: depth.index(0) + 1]
            assert whole.startswith("(") and whole.endswith(" > 0)"), f"{title}: {whole}"


@pytest.fixture(scope="module")
def document() -> Any:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def test_panels_are_of_current_kinds_and_say_how_to_read_them(document: Any) -> None:
    assert document["uid"] == "outrider" and document["schemaVersion"] >= 39
    for panel in panels("ray_"):
        assert panel["type"] in KINDS
        assert re.fullmatch(r"[A-Z][^.]*(\.\w[^.]*)*\.", panel["description"]), panel["description"]
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"] and defaults["noValue"]
    titles = [panel["title"] for panel in document["panels"]]
    assert len(set(titles)) == len(titles)
    assert [p["title"] for p in document["panels"] if p["type"] == "row"] == [
        "Speculation at a glance", "Acceptance", "Wasted work", "Speed", "Health",
    ]  # fmt: skip


def test_panels_have_ids_of_their_own_and_do_not_overlap(document: Any) -> None:
    ids = [panel["id"] for panel in document["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        columns = range(place["x"], place["x"] + place["w"])
        cells = set(itertools.product(columns, range(place["y"], place["y"] + place["h"])))
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_source_of_data_is_a_variable_everywhere(document: Any) -> None:
    text = json.dumps(document)
    assert "${DS_" not in text and "__inputs" not in text and '"datasource": null' not in text
    variables = {each["name"]: each for each in document["templating"]["list"]}
    assert list(variables) == ["datasource", "model", "draft"]
    assert variables["datasource"]["type"] == "datasource"
    for name in ("model", "draft"):
        each = variables[name]
        assert each["type"] == "query" and each["multi"] and each["includeAll"]
        assert each["datasource"]["uid"] == "${datasource}"
    for panel in panels("ray_"):
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_every_panel_follows_the_model_and_the_draft(document: Any) -> None:
    drafts = {f"ray_{i.series}" for i in INSTRUMENTS if "draft" in i.labels}
    for _, query in panel_queries("ray_"):
        for name, matchers in re.findall(r"\b(ray_outrider_\w+)(\{[^}]*\})?", query):
            assert 'model=~"$model"' in matchers
            assert ('draft=~"$draft"' in matchers) == (name in drafts)


def test_quantiles_have_no_value_without_observations() -> None:
    query = Queries("", "5m").quantile(0.5, "time_to_first_token_seconds")
    assert query.endswith(
        "and sum by (model) (rate(outrider_time_to_first_token_seconds_count[5m])) > 0"
    )


def test_every_alert_has_what_whoever_is_woken_needs() -> None:
    operating = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    alerts = [rule for rule in rules("ray_") if "alert" in rule]
    assert len(alerts) == 7
    for alert in alerts:
        assert alert["for"] and alert["labels"]["severity"] in {"warning", "critical"}
        assert alert["annotations"].keys() == {"summary", "description", "runbook"}
        heading = alert["annotations"]["runbook"].partition("docs/operating.md#")[2]
        assert heading == alert["alert"].lower()
        assert f"### {alert['alert']}\n" in operating


def test_runbooks_are_links_where_an_address_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    address = "https://example.org/outrider/operating.md"
    assert main(["dashboard", "--rules", "--runbooks", address]) == 0
    assert f"runbook_url: {address}#outridertargetlost\n" in capsys.readouterr().out


@pytest.mark.parametrize("address", ["", "http://x/{{", "http://x/doc#a", "http://x/\n"])
def test_what_is_no_address_of_runbooks_is_refused(address: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["dashboard", "--rules", "--runbooks", address])
    assert ended.value.code == 2


def test_alerts_read_only_what_is_recorded() -> None:
    recorded = {rule.get("record") for rule in rules("ray_")}
    for _, query in rule_queries("ray_"):
        assert set(re.findall(r"\bmodel\w*:\w+:\w+", query)) <= recorded


@with_promtool
def test_alerts_fire_when_they_should_and_not_otherwise() -> None:
    promtool("check", "rules", RULES)
    promtool("test", "rules", RULES_TEST)


@with_promtool
def test_alerts_are_the_same_without_rays_prefix(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(make_rules(""), encoding="utf-8")
    cases = yaml.safe_load(
        RULES_TEST.read_text(encoding="utf-8").replace("ray_outrider", "outrider")
    )
    cases["rule_files"] = ["rules.yml"]
    (tmp_path / "test.yml").write_text(yaml.safe_dump(cases), encoding="utf-8")
    promtool("check", "rules", tmp_path / "rules.yml")
    promtool("test", "rules", tmp_path / "test.yml")
