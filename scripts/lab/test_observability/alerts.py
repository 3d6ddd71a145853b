"""The course of alerts during faults, and the results of dashboard queries."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

from lab.common.processes import HOST, Program, quiet_ports
from lab.dashboards.__main__ import DASHBOARDS
from lab.dashboards.grafana import Dashboard, Panel, Variable
from lab.test_observability.faults import Fault
from lab.test_observability.site import PROVIDED, Site

RULES: Final = Path("configs/prometheus")
SCRAPE_SECONDS: Final = 1.0
_EVALUATE: Final = "500ms"
_UNITS: Final = {"s": 1, "m": 60, "h": 3600}
_TIME: Final = re.compile(
    r"(?<=\[)(\d+)([smh])(?=\])|(?<=for: )(\d+)([smh])$|(?<=interval: )(\d+)([smh])$", re.MULTILINE
)

Point = tuple[float, float]


def shortened(rules: str, times: int) -> str:
    """Return the rules with ranges, waits and intervals divided by `times`."""

    def shorter(found: re.Match[str]) -> str:
        number, unit = (group for group in found.groups() if group is not None)
        return f"{int(number) * _UNITS[unit] * 1000 // times}ms"

    return _TIME.sub(shorter, rules)


class Series(dict[str, str]):
    """The labels of a series, with its points."""

    def __init__(self, labels: Mapping[str, str], points: Sequence[Point]) -> None:
        super().__init__(labels)
        self.points = points


class Prometheus:
    """A running Prometheus and its HTTP API."""

    def __init__(self, port: int, session: aiohttp.ClientSession) -> None:
        self._url = f"http://{HOST}:{port}/api/v1"
        self._session = session

    async def now(self, expr: str) -> list[Series]:
        """Return the current result of a query."""
        found = await self._get("query", query=expr)
        if found["resultType"] == "scalar":
            return [Series({}, [_point(found["result"])])]
        return [Series(one["metric"], [_point(one["value"])]) for one in found["result"]]

    async def over(self, expr: str, began: float, ended: float, step_seconds: float = 1.0) -> list[Series]:
        """Return the result of a query over a period."""
        found = await self._get("query_range", query=expr, start=began, end=ended, step=step_seconds)
        return [Series(one["metric"], [_point(point) for point in one["values"]]) for one in found["result"]]

    async def names(self) -> set[str]:
        """Return the names of all series."""
        return set(await self._get("label/__name__/values"))

    async def _get(self, path: str, **query: object) -> Any:
        """Return the data of an answer. Raises ValueError with Prometheus' message for an invalid query."""
        async with self._session.get(f"{self._url}/{path}", params={k: str(v) for k, v in query.items()}) as response:
            answer = await response.json()
        if answer["status"] != "success":
            raise ValueError(answer["error"])
        return answer["data"]


def _point(point: Sequence[Any]) -> Point:
    return float(point[0]), float(point[1])


@asynccontextmanager
async def prometheus(
    directory: Path, jobs: Mapping[str, Sequence[str]], times: int, session: aiohttp.ClientSession
) -> AsyncIterator[Prometheus]:
    """Run a Prometheus that scrapes these jobs. Its data and log are in the directory."""
    files = []
    for name in ("recording.yaml", "alerts.yaml"):
        files.append(directory / name)
        files[-1].write_text(shortened((RULES / name).read_text(encoding="utf-8"), times), encoding="utf-8")
    configuration = {
        "global": {
            "scrape_interval": f"{SCRAPE_SECONDS:g}s",
            "scrape_timeout": f"{SCRAPE_SECONDS:g}s",
            "evaluation_interval": _EVALUATE,
        },
        "rule_files": [file.name for file in files],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(targets)}]} for job, targets in jobs.items()
        ],
    }
    # JSON is YAML, too.
    (directory / "prometheus.yaml").write_text(json.dumps(configuration), encoding="utf-8")
    (port,) = quiet_ports(1)
    command = [
        "prometheus",
        f"--config.file={directory / 'prometheus.yaml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={HOST}:{port}",
        "--log.level=warn",
    ]
    program = Program(
        name="prometheus", command=command, port=port, output=directory / "prometheus.log", ready_path="/-/ready"
    )
    with program:
        yield Prometheus(port, session)


_RATE_INTERVAL: Final = "5s"
_AT_ONCE: Final = ("stat", "table")


@dataclass(frozen=True, slots=True)
class Shown:
    """A panel, and the results of its queries."""

    dashboard: Dashboard
    panel: Panel
    series: Sequence[Sequence[Series]]
    problems: Sequence[str]

    @property
    def title(self) -> str:
        return f"{self.dashboard.name}: {self.panel.title}"


def substituted(expr: str) -> str:
    """Return a query as Grafana sends it without selections. Rates cover a few scrapes."""
    return re.sub(r"\$[a-z_]\w*", ".+", expr.replace("$__rate_interval", _RATE_INTERVAL))


async def look(prometheus: Prometheus, began: float, ended: float) -> list[Shown]:
    """Query all panels."""
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
        if panel.needs in PROVIDED:
            wrong += problems(given, query.legend, expr)
    return Shown(dashboard, panel, found, wrong)


def problems(given: Sequence[Series], legend: str, expr: str) -> list[str]:
    """Return the reasons why results cannot be drawn."""
    if not given:
        return [f"no data: {expr}"]
    if not any(isfinite(value) for series in given for _, value in series.points):
        return [f"no number: {expr}"]
    labels = re.findall(r"{{(\w+)}}", legend)
    if not any(all(series.get(label) for label in labels) for series in given):
        return [f"no series has all of {', '.join(labels)}: {expr}"]
    return []


async def empty_variables(prometheus: Prometheus) -> list[str]:
    """Return the variables of dashboards without values."""
    variables = {variable for dashboard in DASHBOARDS for variable in dashboard.variables}
    return [variable.name for variable in variables if not await _values(prometheus, variable)]


async def _values(prometheus: Prometheus, variable: Variable) -> list[Series]:
    selector, _, label = variable.values_of.rpartition(", ")
    return await prometheus.now(f"count by ({label}) ({substituted(selector)})")


async def missing_engine_metrics(prometheus: Prometheus) -> list[str]:
    """Return metrics of engines that dashboards query and no simulated engine has."""
    queries = " ".join(query.expr for dashboard in DASHBOARDS for panel in dashboard.panels for query in panel.queries)
    return sorted(set(re.findall(r"\b(?:vllm|sglang):\w+", queries)) - await prometheus.names())


_PATIENCE_SECONDS: Final = 200.0
_LOOK_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Course:
    """The times of an alert in a run, in seconds since the Unix epoch. None: never."""

    pending: float | None
    firing: float | None
    over: float | None


class AlertWatch:
    """Observes firing alerts, and records the times of faults."""

    def __init__(self, prometheus: Prometheus) -> None:
        self.prometheus = prometheus
        self.fault_times: dict[str, tuple[float, float]] = {}

    async def firing(self) -> set[str]:
        return {series["alertname"] for series in await self.prometheus.now('ALERTS{alertstate="firing"}')}

    async def until(self, alerts: Sequence[str], *, fire: bool) -> list[str]:
        """Wait until all alerts fire, or none does. Return the exceptions after a while."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            firing = await self.firing()
            rest = [alert for alert in alerts if (alert in firing) != fire]
            if not rest or time.monotonic() > deadline:
                return rest
            await asyncio.sleep(_LOOK_SECONDS)

    async def until_quiet(self) -> None:
        """Wait until no alert fires. `outcome` reports the exceptions."""
        await self.until(sorted(alert_rules()), fire=False)


def alert_rules() -> dict[str, bool]:
    """Return all alerts, and whether each one has a pending time."""
    groups = yaml.safe_load((RULES / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: "for" in rule for group in groups for rule in group["rules"]}


async def drive(watch: AlertWatch, site: Site, faults: Sequence[Fault]) -> list[str]:
    """Cause each fault until its alerts fire. Return the problems."""
    problems = []
    for fault in faults:
        problems += [f"{alert} fires before {fault.name}" for alert in await watch.until(fault.alerts, fire=False)]
        began = time.time()
        async with fault.context(site):
            problems += [f"{alert} does not fire: {fault.name}" for alert in await watch.until(fault.alerts, fire=True)]
        watch.fault_times[fault.name] = began, time.time()
        print(f"{fault.name}: {time.time() - began:.0f} s", flush=True)
    return problems


async def outcome(
    watch: AlertWatch, began: float, faults: Sequence[Fault], times: int
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return a table, and the problems of all alerts."""
    rules = alert_rules()
    table: list[tuple[str, ...]] = [("alert", "fault", "pending", "firing", "over")]
    problems = [f"no fault causes {alert}" for alert in rules.keys() - {a for fault in faults for a in fault.alerts}]
    still = await watch.firing()
    for fault in faults:
        fault_times, healed = watch.fault_times[fault.name]
        for alert in fault.alerts:
            course = await _course(watch.prometheus, alert, fault_times, time.time())
            if course.firing is None or alert in still:
                problems.append(f"{alert}: {'still fires' if alert in still else 'never fired'} after {fault.name}")
            elif rules[alert] and (course.pending is None or course.pending > course.firing):
                problems.append(f"{alert} was not pending before it fired")
            told = (
                _since(at, since)
                for at, since in ((course.pending, fault_times), (course.firing, fault_times), (course.over, healed))
            )
            table.append((alert, fault.name, *told))
    print(f"times are {times} times shorter than in {RULES}; counted from the fault's begin, and over from its end:")
    return table, problems


async def _course(prometheus: Prometheus, alert: str, began: float, ended: float) -> Course:
    """Return the first course of an alert in a period."""
    found = await prometheus.over(f'ALERTS{{alertname="{alert}"}}', began, ended, _LOOK_SECONDS)
    at = {
        state: sorted({t for series in found if series["alertstate"] == state for t, _ in series.points})
        for state in ("pending", "firing")
    }
    firing = at["firing"]
    return Course(next(iter(at["pending"]), None), next(iter(firing), None), first_end(firing))


def first_end(times: Sequence[float]) -> float | None:
    """Return the first end of a condition that was recorded at these times, twice a second, or None."""
    return next((at + _LOOK_SECONDS for at, then in pairwise([*times, inf]) if then - at > 1.0), None)


def _since(at: float | None, since: float) -> str:
    return "–" if at is None else f"{at - since:+.1f} s"
