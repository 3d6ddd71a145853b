"""scripts/test-observability without Prometheus: shortened times, panels without data, and a fault for every alert."""

from __future__ import annotations

import re

import pytest

from lab.dashboards.__main__ import DASHBOARDS
from lab.test_observability.alerts import RULES, Series, Shown, alert_rules, first_end, problems, shortened, substituted
from lab.test_observability.faults import IDLE, UNDER_LOAD
from lab.test_observability.picture import DRAWN, STATS, picture
from tests.test_readme import ROOT


@pytest.mark.parametrize("name", ["recording.yaml", "alerts.yaml"])
def test_all_times_of_a_rule_are_shortened(name: str) -> None:
    text = (ROOT / RULES / name).read_text(encoding="utf-8")
    times = re.compile(r"\[\w+\]|(?:for|interval): \w+$", re.MULTILINE)
    assert all(time.rstrip("]").endswith("ms") for time in times.findall(shortened(text, 60)))
    assert times.sub("", shortened(text, 60)) == times.sub("", text), "and nothing else is changed"


def test_time_is_divided_by_the_factor() -> None:
    assert (
        shortened("rate(a[5m]) + rate(b[1h])\n  for: 30s\n", 60) == "rate(a[5000ms]) + rate(b[60000ms])\n  for: 500ms\n"
    )


def test_every_alert_has_exactly_one_fault() -> None:
    driven = [alert for fault in (*UNDER_LOAD, *IDLE) for alert in fault.alerts]
    assert sorted(driven) == sorted(alert_rules())


def test_alert_ends_at_its_first_pause() -> None:
    assert first_end([]) is None
    assert first_end([5.0, 5.5, 6.0]) == 6.5
    assert first_end([5.0, 5.5, 9.0, 9.5]) == 6.0


def test_query_is_substituted_without_selections() -> None:
    asked = substituted('sum(rate(a{job=~"$job"}[$__rate_interval])) + label_replace(b, "c", "$1", "d", "(.*)")')
    assert asked == 'sum(rate(a{job=~".+"}[5s])) + label_replace(b, "c", "$1", "d", "(.*)")'


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ["no data: q"]),
        ([Series({}, [(1.0, float("nan"))])], ["no number: q"]),
        ([Series({"a": "1"}, [(1.0, 2.0)])], ["no series has all of a, b: q"]),
        ([Series({"a": "1"}, [(1.0, 2.0)]), Series({"a": "1", "b": "2"}, [(1.0, float("inf")), (2.0, 0.0)])], []),
    ],
)
def test_panel_without_number_or_legend_label_is_a_problem(given: list[Series], expected: list[str]) -> None:
    assert problems(given, "{{a}} {{b}}", "q") == expected


def test_picture_draws_existing_panels_with_any_data() -> None:
    points = [(float(at), at % 3 if at != 5 else float("nan")) for at in range(300)]
    series = Series({"instance": "g", "role": "decode", "address": "<d&1>", "code": "200"}, points)
    shown = [
        Shown(dashboard, panel, [[series]] * len(panel.queries), [])
        for dashboard in DASHBOARDS
        for panel in dashboard.panels
        if f"{dashboard.name}: {panel.title}" in DRAWN or panel.title in STATS
    ]
    svg = picture(shown)
    assert svg.count('class="panel"') == len(DRAWN) + len(STATS)
    assert "<d&1>" not in svg
    assert "nan" not in svg
