"""The queries of the dashboard and the rules, as a person or Prometheus would send them."""

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from outrider.deploy.dashboard import make_dashboard
from outrider.deploy.rules import make_rules

PREFIXES = ("ray_", "")


def panels(prefix: str) -> list[dict[str, Any]]:
    """The panels of the dashboard, without the headings of rows."""
    every = json.loads(make_dashboard(prefix))["panels"]
    return [panel for panel in every if panel["type"] != "row"]


def rules(prefix: str) -> list[dict[str, Any]]:
    """Recording rules, and alerts."""
    return [
        rule for group in yaml.safe_load(make_rules(prefix))["groups"] for rule in group["rules"]
    ]


def panel_queries(prefix: str) -> Iterator[tuple[str, str]]:
    """Each panel's title and query, with Grafana's variables still in it."""
    for panel in panels(prefix):
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def rule_queries(prefix: str) -> Iterator[tuple[str, str]]:
    """Each rule's name and query."""
    for rule in rules(prefix):
        yield rule.get("record") or rule["alert"], rule["expr"]


def substituted(query: str, interval: str) -> str:
    """A query as Grafana sends it with everything chosen."""
    query = query.replace("$__rate_interval", interval)
    query = re.sub(r"\$(model|draft)\b", ".*", query)
    assert "$" not in query, query
    return query
