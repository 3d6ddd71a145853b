"""Faults one after the other, until their alerts fire, and what Prometheus has noted of it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from typing import Final

import yaml

from lab.dashboards.__main__ import DASHBOARDS
from lab.dashboards.grafana import Dashboard, Panel, Variable
from lab.test_observability.faults import Fault
from lab.test_observability.prometheus import RULES, Prometheus, Series
from lab.test_observability.site import Site

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


_PATIENCE_SECONDS: Final = 200.0
_LOOK_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Course:
    """Of one alert during a run, in seconds since the Unix epoch; None: never."""

    pending: float | None
    firing: float | None
    over: float | None


class Watch:
    """Which alerts fire, and when each fault happened."""

    def __init__(self, prometheus: Prometheus) -> None:
        self.prometheus = prometheus
        self.happened: dict[str, tuple[float, float]] = {}

    async def firing(self) -> set[str]:
        return {series["alertname"] for series in await self.prometheus.now('ALERTS{alertstate="firing"}')}

    async def until(self, alerts: Sequence[str], *, fire: bool) -> list[str]:
        """Those that after a while still do not fire, or still do."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            firing = await self.firing()
            rest = [alert for alert in alerts if (alert in firing) != fire]
            if not rest or time.monotonic() > deadline:
                return rest
            await asyncio.sleep(_LOOK_SECONDS)

    async def until_quiet(self) -> None:
        """As far as that comes: `outcome` tells what still fires."""
        await self.until(sorted(alert_rules()), fire=False)


def alert_rules() -> dict[str, bool]:
    """The alerts there are, and whether each one is pending for a while."""
    groups = yaml.safe_load((RULES / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: "for" in rule for group in groups for rule in group["rules"]}


async def drive(watch: Watch, site: Site, faults: Sequence[Fault]) -> list[str]:
    """Let each fault happen until its alerts fire. Returns what did not."""
    problems = []
    for fault in faults:
        problems += [f"{alert} fires before {fault.name}" for alert in await watch.until(fault.alerts, fire=False)]
        began = time.time()
        async with fault.happens(site):
            problems += [f"{alert} does not fire: {fault.name}" for alert in await watch.until(fault.alerts, fire=True)]
        watch.happened[fault.name] = began, time.time()
        print(f"{fault.name}: {time.time() - began:.0f} s", flush=True)
    return problems


async def outcome(
    watch: Watch, began: float, faults: Sequence[Fault], times: int
) -> tuple[list[tuple[str, ...]], list[str]]:
    """A table for people, and what is wrong with the course of any alert."""
    rules = alert_rules()
    table: list[tuple[str, ...]] = [("alert", "fault", "pending", "firing", "over")]
    problems = [f"no fault drives {alert}" for alert in rules.keys() - {a for fault in faults for a in fault.alerts}]
    still = await watch.firing()
    for fault in faults:
        happened, healed = watch.happened[fault.name]
        for alert in fault.alerts:
            course = await _course(watch.prometheus, alert, happened, time.time())
            if course.firing is None or alert in still:
                problems.append(f"{alert}: {'still fires' if alert in still else 'never fired'} after {fault.name}")
            elif rules[alert] and (course.pending is None or course.pending > course.firing):
                problems.append(f"{alert} was not pending before it fired")
            told = (
                _since(at, since)
                for at, since in ((course.pending, happened), (course.firing, happened), (course.over, healed))
            )
            table.append((alert, fault.name, *told))
    print(f"times are {times} times shorter than in {RULES}; since the fault began, and over since it had ended:")
    return table, problems


async def _course(prometheus: Prometheus, alert: str, began: float, ended: float) -> Course:
    """Its first course in that time."""
    found = await prometheus.over(f'ALERTS{{alertname="{alert}"}}', began, ended, _LOOK_SECONDS)
    at = {
        state: sorted({t for series in found if series["alertstate"] == state for t, _ in series.points})
        for state in ("pending", "firing")
    }
    firing = at["firing"]
    return Course(next(iter(at["pending"]), None), next(iter(firing), None), first_end(firing))


def first_end(times: Sequence[float]) -> float | None:
    """When something was over for the first time that was noted at these times, twice a second; None: it never was."""
    return next((at + _LOOK_SECONDS for at, then in pairwise([*times, inf]) if then - at > 1.0), None)


def _since(at: float | None, since: float) -> str:
    return "–" if at is None else f"{at - since:+.1f} s"
