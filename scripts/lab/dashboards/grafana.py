"""Elements of a dashboard, and the JSON that Grafana 11 and 12 import.

No part depends on an installation: the data source is a variable, and dashboards have no `uid` and are linked by their
tag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

SCHEMA_VERSION: Final = 41
TAG: Final = "pdproxy"
DOCS: Final = "https://example.com/pdproxy/blob/main/docs"  # below Source in pyproject.toml; a test compares them
_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS: Final = 24

Kind = Literal["timeseries", "stat", "heatmap", "state-timeline", "table"]
Colour = Literal["green", "yellow", "orange", "red", "blue", "text"]


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL and the name of its series. In tables `column` is the name of its values, and `unit` theirs."""

    expr: str
    legend: str = ""
    column: str = ""
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel.

    `unit` is Grafana's id of the unit, `runbook` a page of docs/ with the anchor of a heading, `thresholds` the values
    at which a colour begins, and `states` the words and colours for values. `width` is in 24 columns. None: the row's
    width. `needs`: what the panel has no data without.
    """

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    kind: Kind = "timeseries"
    width: int | None = None
    height: int | None = None
    runbook: str = ""
    stacked: bool = False
    lowest: float | None = 0
    highest: float | None = None
    decimals: int | None = None
    thresholds: Mapping[float, Colour] = field(default_factory=dict)
    states: Sequence[tuple[str, Colour]] = ()
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A heading that folds what is below it. `width` and `height`: of panels that do not say otherwise."""

    title: str
    panels: Sequence[Panel]
    is_folded: bool = False
    width: int = 8
    height: int = 8


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top: the values of a label, all of them unless some are chosen."""

    name: str
    label: str
    values_of: str
    """The argument of Grafana's label_values()."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A page. `name` is that of its file, without `.json`."""

    name: str
    title: str
    description: str
    variables: Sequence[Variable]
    rows: Sequence[Row]

    @property
    def panels(self) -> list[Panel]:
        return [panel for row in self.rows for panel in row.panels]


def as_json(dashboard: Dashboard) -> dict[str, Any]:
    """Return the model that Grafana imports."""
    return {
        "id": None,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": [TAG],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [_other_dashboards()],
        "templating": {"list": [*_fixed_variables(), *map(_variable, dashboard.variables)]},
        "annotations": {"list": [_alerts()]},
        "panels": _laid_out(dashboard.rows),
    }


def _other_dashboards() -> dict[str, Any]:
    link = {"type": "dashboards", "title": TAG, "tags": [TAG], "asDropdown": True, "icon": "external link"}
    return link | {"includeVars": True, "keepTime": True, "targetBlank": False, "url": "", "tooltip": ""}


def _alerts() -> dict[str, Any]:
    firing = 'ALERTS{alertname=~"Pdproxy.+",alertstate="firing"}'
    shown = {"name": "Firing alerts", "enable": True, "hide": False, "iconColor": "red", "titleFormat": "{{alertname}}"}
    return shown | {"datasource": _DATASOURCE, "expr": firing, "step": "30s", "textFormat": "{{role}} {{address}}"}


def _fixed_variables() -> list[dict[str, Any]]:
    """Return the variables for the data source and for the runbook, the address of docs/."""
    datasource = {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus"}
    runbook = {"type": "textbox", "name": "runbook", "label": "Runbook", "query": DOCS}
    return [
        datasource | {"refresh": 1, "regex": "", "hide": 0, "multi": False, "includeAll": False, "current": {}},
        runbook | {"hide": 0, "current": {"text": DOCS, "value": DOCS}},
    ]


def _variable(variable: Variable) -> dict[str, Any]:
    query = f"label_values({variable.values_of})"
    return {
        "type": "query",
        "name": variable.name,
        "label": variable.label,
        "datasource": _DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": variable.name},
        "refresh": 2,
        "regex": "",
        "sort": 1,
        "hide": 0,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _laid_out(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Panels from left to right, as many in a line as fit, each row below the one before."""
    made: list[dict[str, Any]] = []
    top = number = 0
    for row in rows:
        number += 1
        head = {"type": "row", "id": number, "title": row.title, "collapsed": row.is_folded, "panels": []}
        head["gridPos"] = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
        made.append(head)
        top += 1
        left = line = 0
        # The panels of a folded row are inside it; the panels of an open row follow it.
        inside: list[dict[str, Any]] = head["panels"] if row.is_folded else made  # type: ignore[assignment]
        for panel in row.panels:
            width, height = panel.width or row.width, panel.height or row.height
            if left + width > _COLUMNS:
                top, left, line = top + line, 0, 0
            number += 1
            place = {"x": left, "y": top, "w": width, "h": height}
            inside.append(_panel(panel) | {"id": number, "gridPos": place})
            left, line = left + width, max(line, height)
        top += line
    return made


def _panel(panel: Panel) -> dict[str, Any]:
    link = {"title": "Runbook", "url": f"${{runbook}}/{panel.runbook}", "targetBlank": True}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "targets": [_target(panel, index, query) for index, query in enumerate(panel.queries)],
        "links": [link] if panel.runbook else [],
        "options": _OPTIONS[panel.kind],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": _overrides(panel)},
        **(_table(panel) if panel.kind == "table" else {}),
    }


def _target(panel: Panel, index: int, query: Query) -> dict[str, Any]:
    target = {"refId": chr(ord("A") + index), "datasource": _DATASOURCE, "expr": query.expr, "editorMode": "code"}
    if panel.kind == "table":
        return target | {"instant": True, "range": False, "format": "table"}
    ready = {"instant": panel.kind == "stat", "range": panel.kind != "stat"}
    if panel.kind == "heatmap":
        return target | ready | {"format": "heatmap", "legendFormat": "{{le}}"}
    return target | ready | {"legendFormat": query.legend or "__auto"}


def _defaults(panel: Panel) -> dict[str, Any]:
    # The lowest colour holds for everything below, too.
    colours = {0.0: "green" if panel.thresholds else "text"} | dict(panel.thresholds)
    steps = [{"color": colour, "value": value or None} for value, colour in sorted(colours.items())]
    made: dict[str, Any] = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}, "noValue": "–"}
    made |= {name: value for name, value in (("min", panel.lowest), ("max", panel.highest)) if value is not None}
    if panel.decimals is not None:
        made["decimals"] = panel.decimals
    if panel.states:
        words = {str(value): {"text": word, "color": colour} for value, (word, colour) in enumerate(panel.states)}
        made["mappings"] = [{"type": "value", "options": words}]
    if panel.kind == "timeseries":
        made["color"] = {"mode": "palette-classic"}
        made["custom"] = _LINES | (_STACKED if panel.stacked else {})
        made["custom"] |= {"thresholdsStyle": {"mode": "dashed" if panel.thresholds else "off"}}
    elif panel.kind in ("stat", "state-timeline"):
        made["color"] = {"mode": "thresholds"}
    return made


def _overrides(panel: Panel) -> list[dict[str, Any]]:
    """Return the units of a table's columns."""
    return [
        {"matcher": {"id": "byName", "options": query.column}, "properties": [{"id": "unit", "value": query.unit}]}
        for query in panel.queries
        if query.column and query.unit
    ]


def _table(panel: Panel) -> dict[str, Any]:
    """One row for each combination of labels, one column for each query."""
    names = {f"Value #{chr(ord('A') + index)}": query.column for index, query in enumerate(panel.queries)}
    organize = {"excludeByName": {"Time": True}, "renameByName": names, "indexByName": {}}
    return {"transformations": [{"id": "merge", "options": {}}, {"id": "organize", "options": organize}]}


_LINES: Final[dict[str, Any]] = {
    "drawStyle": "line",
    "lineWidth": 1,
    "fillOpacity": 10,
    "showPoints": "never",
    "spanNulls": False,
    "stacking": {"mode": "none", "group": "A"},
}
_STACKED: Final[dict[str, Any]] = {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
_LEGEND: Final = {"showLegend": True, "displayMode": "table", "placement": "bottom", "calcs": ["mean", "max"]}
_REDUCED: Final = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_OPTIONS: Final[dict[Kind, dict[str, Any]]] = {
    "timeseries": {"legend": _LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}},
    "stat": {"reduceOptions": _REDUCED, "colorMode": "value", "graphMode": "none", "textMode": "auto"},
    "heatmap": {
        "calculate": False,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "scale": "exponential", "exponent": 0.5},
        "cellGap": 1,
        "filterValues": {"le": 1e-9},
        "yAxis": {"axisPlacement": "left", "unit": "s"},
        "legend": {"show": True},
        "tooltip": {"mode": "single", "yHistogram": False},
        "rowsFrame": {"layout": "auto"},
    },
    "state-timeline": {
        "mergeValues": True,
        "showValue": "never",
        "rowHeight": 0.85,
        "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "single"},
    },
    "table": {"showHeader": True, "cellHeight": "sm", "footer": {"show": False}},
}
