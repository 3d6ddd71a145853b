"""The report as a table and as JSON."""

from __future__ import annotations

import orjson

from proxy.tools.doctor.findings import Finding, Severity, exit_code, findings_as_json, findings_as_table

OK = Finding(Severity.OK, "engine", "decode 10.0.0.3:7100", "vLLM 0.30.0")
NOTE = Finding(Severity.NOTE, "port", "gateway", "a gateway listens there")
WARNING = Finding(
    Severity.WARNING, "clock", "decode 10.0.0.3:7100", "its clock is 90 s ahead of this host's", "run NTP"
)
FAILURE = Finding(Severity.FAILURE, "connect", "prefill 10.0.0.1:7100", "cannot connect (timed out)", "is it up?")


def test_exit_code_is_the_worst_severity() -> None:
    assert [exit_code(found) for found in ([], [OK, NOTE], [OK, WARNING], [FAILURE, WARNING])] == [0, 0, 1, 2]


def test_table_ends_with_the_worst_finding_and_its_hint() -> None:
    table = findings_as_table([FAILURE, OK, WARNING, NOTE], 80, coloured=False).splitlines()
    assert [line[0] for line in table if line.strip() and line[0] != " "] == ["✓", "·", "!", "✗", "1"]
    assert table[-3].strip() == "→ is it up?"
    assert table[-1] == "1 failure and 1 warning"


def test_table_keeps_to_the_given_width() -> None:
    long = Finding(Severity.FAILURE, "connect", "prefill 10.0.0.1:7100", "many words " * 20, "more words " * 20)
    assert max(map(len, findings_as_table([long], 90, coloured=False).splitlines())) <= 90


def test_many_pairs_without_problems_take_one_line() -> None:
    pairs = [Finding(Severity.OK, "kv", f"P{number} → D0", "KV was fetched") for number in range(256)]
    table = findings_as_table(pairs, 80, coloured=False)
    assert "256 pairs" in table
    assert "no problems found" in table
    assert len(table.splitlines()) == 3


def test_control_characters_of_engines_are_replaced() -> None:
    finding = Finding(Severity.OK, "engine", "decode 10.0.0.3:7100", "vLLM, \x1b[2Jmodel\r\n")
    assert "\x1b" not in findings_as_table([finding], 80, coloured=False)


def test_table_is_coloured_only_for_a_terminal() -> None:
    assert "\x1b" in findings_as_table([FAILURE], 80, coloured=True)
    assert "\x1b" not in findings_as_table([FAILURE], 80, coloured=False)


def test_json_contains_every_finding() -> None:
    report = orjson.loads(findings_as_json([OK, FAILURE]))
    assert report["exit_code"] == 2
    assert report["findings"][1] == {
        "severity": "failure",
        "check": "connect",
        "subject": "prefill 10.0.0.1:7100",
        "words": "cannot connect (timed out)",
        "hint": "is it up?",
    }
