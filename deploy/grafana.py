"""Grafana's dashboards as JSON: panels of its current kinds, laid out in rows.

Knows nothing of what is shown.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Json = dict[str, object]

DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH = 24  # of Grafana's grid
_SCHEMA = 39  # Grafana 11 and later read it


@dataclass(frozen=True)
class Target:
    """A query, and the name of each series that it returns."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """What a panel shows; `options` and `defaults` are those of its kind."""

    kind: str
    title: str
    description: str
    targets: Sequence[Target]
    unit: str
    width: int
    height: int
    no_value: str
    options: Json
    defaults: Json = field(default_factory=dict)
    format: str = "time_series"
    extra: Json = field(default_factory=dict)

    @property
    def is_instant(self) -> bool:
        """It shows the present only."""
        return self.kind in ("stat", "bargauge", "table")


def timeseries(
    title: str,
    description: str,
    *targets: Target,
    unit: str,
    no_value: str = "no traffic",
    stacked: bool = False,
    bounds: Json | None = None,
) -> Panel:
    """Lines over time, or areas on top of each other."""
    custom: Json = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if stacked else 0,
        "showPoints": "auto",  # a value between two gaps is no line
        "spanNulls": False,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }
    options: Json = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    defaults: Json = {"min": 0, **(bounds or {}), "custom": custom}
    return Panel("timeseries", title, description, targets, unit, 8, 8, no_value, options, defaults)


def stat(
    title: str,
    description: str,
    *targets: Target,
    unit: str,
    no_value: str = "no traffic",
    steps: Sequence[tuple[float, str]] = (),
    decimals: int | None = None,
    words: Mapping[int, str] | None = None,
) -> Panel:
    """The present value, large; `steps` colour it from a value on, `words` stand for values."""
    options: Json = {
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "auto",
    }
    defaults = _thresholds(steps) | ({} if decimals is None else {"decimals": decimals})
    if words:
        texts = {str(value): {"text": text} for value, text in words.items()}
        defaults |= {"mappings": [{"type": "value", "options": texts}]}
    return Panel("stat", title, description, targets, unit, 6, 4, no_value, options, defaults)


def bargauge(
    title: str,
    description: str,
    *targets: Target,
    unit: str,
    no_value: str = "no traffic",
    steps: Sequence[tuple[float, str]] = (),
    bounds: Json | None = None,
) -> Panel:
    """The present values as bars beside each other."""
    options: Json = {
        "displayMode": "basic",
        "orientation": "horizontal",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showUnfilled": True,
        "valueMode": "color",
    }
    defaults: Json = {"min": 0, **(bounds or {}), **_thresholds(steps)}
    return Panel("bargauge", title, description, targets, unit, 8, 8, no_value, options, defaults)


def heatmap(
    title: str, description: str, target: Target, *, unit: str, no_value: str = "no traffic"
) -> Panel:
    """A histogram's buckets, which are in `unit`, over time."""
    options: Json = {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Blues", "steps": 64, "reverse": False},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "tooltip": {"mode": "single", "yHistogram": False},
        "yAxis": {"unit": unit, "axisPlacement": "left"},
    }
    return Panel(
        "heatmap", title, description, [target], "cps", 8, 8, no_value, options, format="heatmap"
    )


def table(
    title: str,
    description: str,
    columns: Sequence[tuple[str, str, Target]],
    *,
    no_value: str = "no traffic",
) -> Panel:
    """One line for each set of labels; a column is a heading, a unit and a query."""
    values = [f"Value #{letter}" for letter in _letters(len(columns))]
    headings = {value: heading for value, (heading, _, _) in zip(values, columns, strict=True)}
    units: list[object] = [
        {
            "matcher": {"id": "byName", "options": heading},
            "properties": [{"id": "unit", "value": unit}],
        }
        for heading, unit, _ in columns
    ]
    transformations: list[object] = [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": headings}},
    ]
    return Panel(
        "table",
        title,
        description,
        [target for _, _, target in columns],
        "short",
        16,
        8,
        no_value,
        {"showHeader": True, "cellHeight": "sm"},
        format="table",
        extra={"transformations": transformations, "overrides": units},
    )


def dashboard(uid: str, title: str, variables: list[Json], rows: dict[str, list[Panel]]) -> Json:
    """The whole document."""
    return {
        "annotations": {"list": []},
        "editable": True,
        "graphTooltip": 1,
        "id": None,
        "links": [],
        "panels": list(_placed(rows)),
        "refresh": "30s",
        "schemaVersion": _SCHEMA,
        "tags": [uid],
        "templating": {"list": [_datasource_variable(), *variables]},
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "title": title,
        "uid": uid,
    }


def query_variable(name: str, label: str, query: str) -> Json:
    """A choice of several values that a query finds."""
    return {
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "datasource": DATASOURCE,
        "definition": query,
        "includeAll": True,
        "label": label,
        "multi": True,
        "name": name,
        "options": [],
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "type": "query",
    }


def _datasource_variable() -> Json:
    return {
        "current": {},
        "includeAll": False,
        "label": "Data source",
        "multi": False,
        "name": "datasource",
        "options": [],
        "query": "prometheus",
        "refresh": 1,
        "type": "datasource",
    }


def _placed(rows: dict[str, list[Panel]]) -> Iterator[Json]:
    """Panels from left to right, below each other, each row under its heading."""
    ids = itertools.count(1)
    y = 0
    for title, panels in rows.items():
        place: Json = {"x": 0, "y": y, "w": _WIDTH, "h": 1}
        yield {
            "collapsed": False, "gridPos": place, "id": next(ids), "panels": [],
            "title": title, "type": "row",
        }  # fmt: skip
        x, y, height = 0, y + 1, 0
        for panel in panels:
            if x + panel.width > _WIDTH:
                x, y, height = 0, y + height, 0
            place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            yield _panel(panel, next(ids), place)
            x, height = x + panel.width, max(height, panel.height)
        y += height


def _panel(panel: Panel, id: int, place: Json) -> Json:
    extra = dict(panel.extra)
    return {
        "datasource": DATASOURCE,
        "description": panel.description,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "noValue": panel.no_value, **panel.defaults},
            "overrides": extra.pop("overrides", []),
        },
        "gridPos": place,
        "id": id,
        "options": panel.options,
        "targets": [
            {
                "datasource": DATASOURCE,
                "editorMode": "code",
                "expr": target.expr,
                "format": panel.format,
                "instant": panel.is_instant,
                "legendFormat": target.legend,
                "range": not panel.is_instant,
                "refId": letter,
            }
            for letter, target in zip(_letters(len(panel.targets)), panel.targets, strict=True)
        ],
        "title": panel.title,
        "type": panel.kind,
        **extra,
    }


def _thresholds(steps: Sequence[tuple[float, str]]) -> Json:
    if not steps:
        return {"color": {"mode": "fixed", "fixedColor": "blue"}}
    lowest, *others = [{"value": value, "color": color} for value, color in steps]
    return {
        "color": {"mode": "thresholds"},
        "thresholds": {"mode": "absolute", "steps": [{**lowest, "value": None}, *others]},
    }


def _letters(count: int) -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[:count]
