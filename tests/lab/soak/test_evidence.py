"""Parsing logs and samples, and the table of results."""

from __future__ import annotations

from lab.soak.evidence import Outcome, absences, log_lines
from lab.soak.invariants import details, judged, table
from tests.lab.soak.logs import D, answer, evidence, fault, line, sample

LOG = """\
{"time":"1970-01-01T00:00:10.500Z","logger":"proxy.discovery.prober","message":"decode instance h:1 is down: no"}
{"time":"1970-01-01T00:00:11.000Z","logger":"proxy.discovery.prober","message":"decode instance h:2 is down: no"}
{"time":"1970-01-01T00:00:12.250Z","logger":"proxy.discovery.prober","message":"decode instance h:1 is up: yes"}
Fatal Python error: everything is lost
"""


def test_log_with_any_lines_is_read() -> None:
    lines = log_lines(LOG)
    assert [one["at"] for one in lines] == [10.5, 11.0, 12.25, 0.0]
    assert lines[3]["message"] == "Fatal Python error: everything is lost"
    assert lines[3]["logger"] == ""


def test_instances_are_absent_from_going_down_to_coming_up() -> None:
    found = absences(log_lines(LOG), until=20.0)
    assert [(absence.instance, absence.began, absence.ended) for absence in found] == [
        ("h:1", 10.5, 12.25),
        ("h:2", 11.0, 20.0),
    ]


def test_samples_are_summed_and_grouped_by_labels() -> None:
    of_two = sample(
        metrics={
            ("pdproxy_retries_total", (("reason", "reset"), ("stage", "prefill"))): 2.0,
            ("pdproxy_retries_total", (("reason", "status"), ("stage", "prefill"))): 1.0,
            ("pdproxy_retries_total", (("reason", "reset"), ("stage", "decode"))): 0.0,
        }
    )
    assert of_two.total("pdproxy_retries_total") == 3.0
    assert of_two.total("pdproxy_retries_total", reason="reset") == 2.0
    assert of_two.by("pdproxy_retries_total", "stage") == {("prefill",): 3.0}


def test_table_has_all_results() -> None:
    of_failure = evidence(
        answers=[answer(), answer(id="soak-2.7", outcome=Outcome.CUT, problem="reset", ended=12.0, status=None)],
        lines=[line(), line(id="soak-2.7", code=502, term="SD", error="the engine is gone")],
        faults=[fault()],
    )
    verdicts = judged(of_failure)
    shown = table(of_failure, verdicts)
    for words in ("requests", "client-visible failures", "cut: reset", "I15 nothing grows"):
        assert words in shown
    assert "VIOLATED 1 times" in next(row for row in shown.splitlines() if row.startswith("I14"))
    explained = details(of_failure, verdicts)
    assert f"soak-2.7 during kill decode {D}: cut reset" in explained
    assert "the engine is gone" in explained


def test_line_of_suppressed_lines_ends_no_request() -> None:
    left_out = {"logger": "proxy.access", "at": 12.0, "message": "left out: request", "term": "PQ", "suppressed": 7}
    of_flood = evidence(lines=[line(), left_out])
    assert of_flood.ends == [line()]
    assert not any(judged(of_flood).values())
