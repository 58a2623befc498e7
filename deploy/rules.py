"""Prometheus' rules: rates to keep, and the alerts that docs/operating.md explains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from outrider.deploy.promql import LONG, Queries, ratio

_WINDOW = "5m"
_RUNBOOKS = "docs/operating.md"
_HEAD = """\
# Made by `outrider dashboard --rules`{option}: change deploy/rules.py, not this file.
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

    def rule(self) -> dict[str, object]:
        """The alert as Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.lasting,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{_RUNBOOKS}#{self.name.lower()}",
            },
        }


def make_rules(prefix: str) -> str:
    """The file that Prometheus loads, for names that begin so."""
    ask = Queries(prefix, _WINDOW)
    records = [{"record": name, "expr": expr} for name, expr in _records(ask).items()]
    alerts = [alert.rule() for alert in _alerts(ask)]
    groups: Mapping[str, Sequence[object]] = {"outrider_rates": records, "outrider_alerts": alerts}
    document = {"groups": [{"name": name, "rules": rules} for name, rules in groups.items()]}
    option = "" if prefix else ' --prefix ""'
    return _HEAD.format(option=option) + yaml.safe_dump(document, sort_keys=False, width=100)


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
            f"{_grown(ask, 'target_rebuilds', '10m')} or {_born(ask, 'target_rebuilds', '10m')}",
            "1m",
            "critical",
            "The target of {{ $labels.model }} was lost",
            "It was made anew, or is being made, in the last ten minutes: see the coordinator's"
            " log.",
        ),
    ]


def _nearly_full(ask: Queries) -> str:
    waiting, places = ask.series("num_requests_waiting"), ask.series("max_requests_waiting")
    return f"max by (model) ({ratio(waiting, places)}) > 0.9"  # of any coordinator


def _grown(ask: Queries, name: str, window: str) -> str:
    return f"sum by (model) (increase({ask.series(name)}[{window}])) > 0"


def _born(ask: Queries, name: str, window: str) -> str:
    """Counted for the first time by a coordinator that was there before.

    Under Ray that is the birth of the series, which is no increase.
    """
    series = ask.series(name)
    known = f"on (model) {ask.series('cache_rows')} offset {window}"
    return f"sum by (model) ({series} unless {series} offset {window} and {known}) > 0"
