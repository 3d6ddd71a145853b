"""The dashboards in configs/grafana equal their descriptions, use fields of Grafana, and are readable."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard as GrafanaDashboard

from lab.dashboards.__main__ import DASHBOARDS, DIRECTORY
from lab.dashboards.grafana import TAG, Dashboard, as_json
from lab.dashboards.instances import STATES
from proxy.balancer.backend_health import HealthState
from tests.test_readme import PAGES, anchors

ROOT = Path(__file__).parents[3]
# Fields of Grafana's Prometheus data source that its common schema lacks.
OF_PROMETHEUS = {"definition", "titleFormat", "textFormat", "step"}

each = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
each_panel = pytest.mark.parametrize(
    "panel",
    [pytest.param(panel, id=f"{d.name}: {panel.title}") for d in DASHBOARDS for panel in d.panels],
)


def panels(model: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels, including those in collapsed rows."""
    return [inner for panel in model["panels"] for inner in (panel, *panel.get("panels", ()))]


@each
def test_dashboard_file_equals_its_description(dashboard: Dashboard) -> None:
    file = ROOT / DIRECTORY / f"{dashboard.name}.json"
    assert json.loads(file.read_text(encoding="utf-8")) == as_json(dashboard), "write it with scripts/dashboards"


def test_no_other_dashboard_files_exist() -> None:
    assert {path.stem for path in (ROOT / DIRECTORY).glob("*.json")} == {dashboard.name for dashboard in DASHBOARDS}


def unknown(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Return the fields of our model that theirs lacks."""
    if isinstance(ours, dict):
        for name, value in ours.items():
            if value is not None and name not in OF_PROMETHEUS:
                yield from [f"{path}.{name}"] if name not in theirs else unknown(value, theirs[name], f"{path}.{name}")
    elif isinstance(ours, list):
        for one, other in zip(ours, theirs, strict=True):
            yield from unknown(one, other, f"{path}[]")
    elif ours != theirs:
        yield f"{path}: {ours} is read as {theirs}"


@each
def test_every_field_is_in_grafanas_schema(dashboard: Dashboard) -> None:
    register_default_plugins()
    model = as_json(dashboard)
    read = json.loads(JSONEncoder().encode(GrafanaDashboard.from_json(model)))
    assert list(unknown(model, read)) == []


def test_unknown_field_is_detected() -> None:
    assert list(unknown({"a": 1, "b": [{"c": 2}]}, {"b": [{"c": 3}]})) == [".a", ".b[].c: 2 is read as 3"]


@each
def test_dashboards_name_no_installation(dashboard: Dashboard) -> None:
    model = as_json(dashboard)
    assert "uid" not in model
    assert model["tags"] == [TAG]
    uids = set(re.findall(r'"uid": "([^"]*)"', json.dumps(model)))
    assert uids == {"${datasource}"}


@each
def test_panels_do_not_overlap_and_have_unique_ids(dashboard: Dashboard) -> None:
    placed = panels(as_json(dashboard))
    assert len({panel["id"] for panel in placed}) == len(placed)
    cells = []
    for place in (panel["gridPos"] for panel in placed):
        assert place["x"] + place["w"] <= 24
        columns, rows = (range(place[at], place[at] + place[size]) for at, size in (("x", "w"), ("y", "h")))
        cells.append({(x, y) for x in columns for y in rows})
    assert all(one.isdisjoint(other) for one, other in combinations(cells, 2))


@each
def test_variables_are_used_and_defined(dashboard: Dashboard) -> None:
    queries = " ".join(query.expr for panel in dashboard.panels for query in panel.queries)
    queries += " ".join(variable.values_of for variable in dashboard.variables)
    used = set(re.findall(r"\$([a-z_]\w*)", queries)) - {"__rate_interval"}
    assert used == {variable.name for variable in dashboard.variables}


@each_panel
def test_panel_has_a_description(panel: Any) -> None:
    assert panel.description.endswith((".", ")"))
    assert re.search(r"(pdproxy_|vllm:|sglang:|\(up\)|alerts\.yaml)", panel.description), "names its metric"
    assert panel.unit
    assert len(panel.queries) == 1 or len({query.legend or query.column for query in panel.queries}) > 1
    assert not panel.needs or "Requires" in panel.description or "No data: " in panel.description
    page, _, anchor = panel.runbook.partition("#")
    assert not panel.runbook or anchor in anchors(PAGES[f"docs/{page}"])


def test_names_of_states_are_those_of_the_metric() -> None:
    assert [word for word, _ in STATES] == list(HealthState)
