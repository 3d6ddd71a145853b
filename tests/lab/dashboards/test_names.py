"""Metrics and labels in dashboards, rules and documents exist in the gateway."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.dashboards.__main__ import DASHBOARDS
from lab.dashboards.grafana import DOCS
from proxy.common.terms import Stage
from proxy.observe import metrics
from tests.lab.dashboards.promql import names_of_query
from tests.reference_pages.metrics import series
from tests.test_readme import PAGES, anchors

RULES = Path(__file__).parents[3] / "configs" / "prometheus"
RUNBOOK = PAGES["docs/troubleshooting/alerts.md"]
KNOWN = series()
OF_PROMETHEUS = {"ALERTS": {"alertname", "alertstate"}, "up": set[str]()}
TARGET = {"job", "instance"}
# Copied by hand from vLLM 0.32 and SGLang 0.5.23. scripts/test-observability checks them with simulated engines.
ENGINES = {
    "vllm": {"engine", "model_name", "source", "le"},
    "sglang": {"model_name", "mode", "le"},
}


def rules(file: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((RULES / file).read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


RECORDED = {rule["record"]: rule["expr"] for rule in rules("recording.yaml")}
ALERTS = {rule["alert"]: rule for rule in rules("alerts.yaml")}


def labels_of(name: str) -> set[str]:
    """Return the labels of a series. The name of a recorded series begins with the labels that it is recorded by."""
    level = name.partition(":")[0]
    if name in RECORDED:
        return set(level.split("_"))
    labels_by_name: dict[str, Any] = {**KNOWN, **OF_PROMETHEUS}
    if level not in ENGINES and name not in labels_by_name:
        pytest.fail(f"there is no {name}")
    return {*(ENGINES.get(level) or labels_by_name[name]), *TARGET}


def family_of(name: str) -> str:
    """Return the name of a series without the suffix of a histogram's part."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


def check(expr: str) -> None:
    found = names_of_query(expr)
    labels_by_name = {name: labels_of(name) for name in found.names if name}
    for name, labels in found.selectors:
        assert labels <= labels_by_name.get(name, TARGET), expr
    # `label_replace` makes `instance` of `address`, and targets have that label, too.
    assert found.grouped <= set().union(*labels_by_name.values()), expr


QUERIES = [
    pytest.param(query.expr, query.legend, id=f"{dashboard.name}: {panel.title} {index}")
    for dashboard in DASHBOARDS
    for panel in dashboard.panels
    for index, query in enumerate(panel.queries)
]


@pytest.mark.parametrize(("expr", "legend"), QUERIES)
def test_query_uses_existing_metrics_and_labels(expr: str, legend: str) -> None:
    check(expr)
    assert set(re.findall(r"{{(\w+)}}", legend)) <= set(re.findall(r"\w+", expr)), "the legend has other labels"


def test_every_metric_has_a_panel() -> None:
    def families(expr: str) -> set[str]:
        """Return the families of a query, and of the recording rules that it uses."""
        found = set[str]()
        for name in names_of_query(expr).names:
            found |= families(RECORDED[name]) if name in RECORDED else {family_of(name)}
        return found

    queries = [query.expr for dashboard in DASHBOARDS for panel in dashboard.panels for query in panel.queries]
    assert {family_of(name) for name in KNOWN} - set().union(*map(families, queries)) == set()


@pytest.mark.parametrize("name", RECORDED)
def test_recording_rule_uses_existing_metrics_and_labels(name: str) -> None:
    check(RECORDED[name])
    outermost = re.search(r"by \(([^)]*)\)", RECORDED[name])
    assert outermost is None or set(re.findall(r"\w+", outermost[1])) - {"le"} == labels_of(name)


@pytest.mark.parametrize("name", ALERTS)
def test_alert_uses_existing_metrics_and_labels(name: str) -> None:
    rule = ALERTS[name]
    check(rule["expr"])
    labels_in_text = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    assert labels_in_text <= {label for series in names_of_query(rule["expr"]).names for label in labels_of(series)}
    assert rule["labels"]["severity"] in ("page", "ticket")


@pytest.mark.parametrize("name", ALERTS)
def test_alert_has_a_section_in_the_runbook(name: str) -> None:
    assert ALERTS[name]["annotations"]["runbook_url"] == f"{DOCS}/troubleshooting/alerts.md#{name.lower()}"
    assert f"\n## {name}\n" in RUNBOOK
    assert name.lower() in anchors(RUNBOOK)


def test_runbooks_are_pages_of_the_source() -> None:
    urls = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["urls"]
    assert f"{urls['Source']}/blob/main/docs" == DOCS
    assert urls["Documentation"] == f"{DOCS}/index.md"


def test_runbook_has_no_section_for_a_removed_alert() -> None:
    assert re.findall(r"^## (Pdproxy\w+)$", RUNBOOK, re.MULTILINE) == list(ALERTS)


# scripts/test-observability runs these tests by promtool.
def test_alert_has_a_unit_test_with_silence_firing_and_end() -> None:
    tests = yaml.safe_load((RULES / "alerts_test.yaml").read_text(encoding="utf-8"))["tests"]
    for test in tests:
        name = test["name"].partition(" ")[0]  # an alert with several causes has a test for each
        outcomes = [(e["expr"], e["exp_samples"][0]["value"]) for e in test["promql_expr_test"]]
        expr = f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)'
        assert outcomes == [(expr, value) for value in (0, 1, 0)]
    assert {test["name"].partition(" ")[0] for test in tests} == set(ALERTS)


def test_label_values_in_rules_exist() -> None:
    label_values = {
        "result": {*metrics.HANDOVERS, *metrics.RELEASES, *metrics.CANARIES, "ok", "failed"},
        "side": {side for side, _ in metrics.BROKEN_STREAMS},
        "reason": {*metrics.REJECTIONS},
        "stage": {stage.label for stage in Stage},
        "role": {*metrics.LEGS},
        "api": {*metrics.APIS},
    }
    text = " ".join([*RECORDED.values(), *(rule["expr"] for rule in ALERTS.values())])
    named = re.findall(r'\b(result|side|reason|stage|role|api)[!=]=?~?"([^"]+)"', text)
    assert len(named) > 5
    for label, values in named:
        assert set(values.split("|")) <= label_values[label], (label, values)


@pytest.mark.parametrize("page", [name for name in PAGES if name != "CHANGELOG.md"])
def test_page_names_existing_metrics_and_labels(page: str) -> None:
    families = {family_of(name) for name in KNOWN} | {*KNOWN}
    for name, labels in re.findall(r"\b(pdproxy_\w+)(?:\{([^}`]*)\})?", PAGES[page]):
        assert name in families or (name.endswith("_") and any(family.startswith(name) for family in families)), name
        assert not labels or set(re.findall(r"(\w+)(?:[,=]|$)", labels)) <= labels_of(name), (name, labels)
