"""The queries of the dashboards, asked of Prometheus as Grafana would, and whether there was anything to draw."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Final

from lab.dashboards.all import DASHBOARDS
from lab.dashboards.grafana import Dashboard, Panel, Variable
from lab.test_observability.prometheus import Prometheus, Series

_RATE_INTERVAL: Final = "5s"
_AT_ONCE: Final = ("stat", "table")


@dataclass(frozen=True, slots=True)
class Shown:
    """A panel, and what each of its queries gave."""

    dashboard: Dashboard
    panel: Panel
    series: Sequence[Sequence[Series]]
    problems: Sequence[str]

    @property
    def title(self) -> str:
        return f"{self.dashboard.name}: {self.panel.title}"


def substituted(expr: str) -> str:
    """A query with nothing chosen, as Grafana sends it. Rates go over a few scrapes."""
    return re.sub(r"\$[a-z_]\w*", ".+", expr.replace("$__rate_interval", _RATE_INTERVAL))


async def look(prometheus: Prometheus, began: float, ended: float) -> list[Shown]:
    """All panels."""
    return [
        await _look_at(prometheus, dashboard, panel, began, ended)
        for dashboard in DASHBOARDS
        for panel in dashboard.panels
    ]


async def _look_at(prometheus: Prometheus, dashboard: Dashboard, panel: Panel, began: float, ended: float) -> Shown:
    found, wrong = [], []
    for query in panel.queries:
        expr = substituted(query.expr)
        try:
            given = await (prometheus.now(expr) if panel.kind in _AT_ONCE else prometheus.over(expr, began, ended))
        except ValueError as error:
            given = []
            wrong.append(str(error))
        found.append(given)
        wrong += problems(given, query.legend, expr)
    return Shown(dashboard, panel, found, wrong)


def problems(given: Sequence[Series], legend: str, expr: str) -> list[str]:
    """Why this is not enough to draw."""
    if not given:
        return [f"nothing: {expr}"]
    if not any(isfinite(value) for series in given for _, value in series.points):
        return [f"no number: {expr}"]
    labels = re.findall(r"{{(\w+)}}", legend)
    if not any(all(series.get(label) for label in labels) for series in given):
        return [f"no series has all of {', '.join(labels)}: {expr}"]
    return []


async def empty_variables(prometheus: Prometheus) -> list[str]:
    """Choices at the top of dashboards for which there is nothing to choose."""
    variables = {variable for dashboard in DASHBOARDS for variable in dashboard.variables}
    return [variable.name for variable in variables if not await _values(prometheus, variable)]


async def _values(prometheus: Prometheus, variable: Variable) -> list[Series]:
    selector, _, label = variable.values_of.rpartition(", ")
    return await prometheus.now(f"count by ({label}) ({substituted(selector)})")


async def missing_engine_metrics(prometheus: Prometheus) -> list[str]:
    """Series of engines that dashboards ask for, and no simulated engine has. Many panels take either engine's."""
    queries = " ".join(query.expr for dashboard in DASHBOARDS for panel in dashboard.panels for query in panel.queries)
    return sorted(set(re.findall(r"\b(?:vllm|sglang):\w+", queries)) - await prometheus.names())
