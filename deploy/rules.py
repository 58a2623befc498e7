"""Prometheus' rules: rates to keep, and the alerts that docs/operating.md explains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from outrider.deploy.promql import LONG, Queries, ratio

RUNBOOKS = "docs/operating.md"
_WINDOW = "5m"
_HEAD = """\
# Made by `outrider dashboard --rules{options}`: change deploy/rules.py, not this file.
#
# Recording rules, named level:what:how, and alerts; docs/operating.md has a paragraph on each.

"""


@dataclass(frozen=True)
class Alert:
    """An alert; its paragraph in the runbook has its name as heading."""

    name: str
    expr: str
    lasting: str  # before it fires
    severity: str
    summary: str
    description: str

    def rule(self, runbooks: str) -> dict[str, object]:
        """The alert as Prometheus reads it; `runbooks` is the address of docs/operating.md."""
        # Pagers make a link of the one, which a path in this repository is not.
        link = "runbook_url" if "://" in runbooks else "runbook"
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.lasting,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                link: f"{runbooks}#{self.name.lower()}",
            },
        }


def make_rules(prefix: str, runbooks: str = RUNBOOKS) -> str:
    """The file that Prometheus loads, for names that begin so."""
    ask = Queries(prefix, _WINDOW)
    records = [{"record": name, "expr": expr} for name, expr in _records(ask).items()]
    alerts = [alert.rule(runbooks) for alert in _alerts(ask)]
    groups: Mapping[str, Sequence[object]] = {"outrider_rates": records, "outrider_alerts": alerts}
    document = {"groups": [{"name": name, "rules": rules} for name, rules in groups.items()]}
    options = "" if prefix else ' --prefix ""'
    return _HEAD.format(options=options) + yaml.safe_dump(document, sort_keys=False, width=100)


def _records(ask: Queries) -> dict[str, str]:
    of_draft = "model_draft:outrider"
    return {
        f"model:outrider_acceptance:ratio_rate{_WINDOW}": ask.acceptance(),
        f"model:outrider_acceptance_length:ratio_rate{_WINDOW}": ask.length(),
        f"model:outrider_output_from_drafts:ratio_rate{_WINDOW}": ask.output_from_drafts(),
        f"model:outrider_generation_tokens:rate{_WINDOW}": ask.rate("generation_tokens"),
        f"model:outrider_speedup:ratio_rate{_WINDOW}": ask.speedup(),
        f"{of_draft}_draft_tokens:rate{_WINDOW}": ask.rate("spec_decode_num_draft_tokens", "draft"),
        f"{of_draft}_acceptance:ratio_rate{_WINDOW}": ask.acceptance("draft"),
        f"{of_draft}_acceptance:ratio_rate{LONG}": ask.over(LONG).acceptance("draft"),
        f"{of_draft}_acceptance_length:ratio_rate{_WINDOW}": ask.length("draft"),
        f"{of_draft}_payoff:ratio_rate{_WINDOW}": ask.payoff(),
        f"model_draft_position:outrider_acceptance:ratio_rate{_WINDOW}": (
            ask.acceptance_where_drafted()
        ),
    }


def _alerts(ask: Queries) -> list[Alert]:
    draft = "{{ $labels.draft }} of {{ $labels.model }}"
    acceptance = "model_draft:outrider_acceptance:ratio_rate"
    enough = f"model_draft:outrider_draft_tokens:rate{_WINDOW} > 1"
    drafting = f"sum by (model) (model_draft:outrider_draft_tokens:rate{_WINDOW}) > 1"
    return [
        Alert(
            "OutriderAcceptanceCollapsed",
            f"{acceptance}{_WINDOW} < 0.5 * {acceptance}{LONG} and {enough}",
            "10m",
            "warning",
            f"Acceptance of draft {draft} has collapsed",
            "{{ $value | humanizePercentage }} of its tokens are accepted: less than half of the"
            " last day's share.",
        ),
        Alert(
            "OutriderDraftSlowsDown",
            f"model_draft:outrider_payoff:ratio_rate{_WINDOW} < 1 and {enough}",
            "15m",
            "warning",
            f"Draft {draft} slows its target down",
            'A second of its drafting saves {{ $value | printf "%.2f" }} s of plain decoding.',
        ),
        Alert(
            "OutriderSlowerThanPlain",
            f"model:outrider_speedup:ratio_rate{_WINDOW} < 1 and {drafting}",
            "15m",
            "warning",
            "{{ $labels.model }} is slower than it would be without drafts",
            'Tokens come {{ $value | printf "%.2f" }} times as fast as by plain decoding.',
        ),
        Alert(
            "OutriderDraftsGone",
            f"min by (model, draft) ({ask.series('draft_replicas_living')}) == 0",
            "5m",
            "warning",
            f"No replica of draft {draft} answers",
            "Its sequences are decoded by other drafts or plainly until one comes back.",
        ),
        Alert(
            "OutriderQueueFull",
            f"{_nearly_full(ask)} or {_grown(ask, 'rejected_requests', _WINDOW)}",
            "5m",
            "warning",
            "The queue of {{ $labels.model }} is full",
            "Requests are refused with 429, or nine tenths of the places are taken.",
        ),
        Alert(
            "OutriderTargetLost",
            f"{_grown(ask, 'target_rebuilds', '10m')} or {_any_lost(ask)}",
            "1m",
            "critical",
            "The target of {{ $labels.model }} was lost",
            "It is being made anew, or was in the last ten minutes: see the coordinator's log.",
        ),
        Alert(
            "OutriderGone",
            f"{_present_lately(ask)} unless on (model) {ask.series('target_ready')}",
            "2m",
            "critical",
            "No coordinator of {{ $labels.model }} can be seen",
            "None was scraped for some minutes: it ended, it loads, or the scrape fails.",
        ),
    ]


def _nearly_full(ask: Queries) -> str:
    waiting, places = ask.series("num_requests_waiting"), ask.series("max_requests_waiting")
    return f"max by (model) ({ratio(waiting, places)}) > 0.9"  # of any coordinator


def _grown(ask: Queries, name: str, window: str) -> str:
    return f"sum by (model) (increase({ask.series(name)}[{window}])) > 0"


def _any_lost(ask: Queries) -> str:
    return f"1 - min by (model) ({ask.series('target_ready')}) > 0"


def _present_lately(ask: Queries) -> str:
    return f"max by (model) (last_over_time({ask.series('target_ready')}[1h]))"
