"""Every invariant, with logs in which it holds and logs in which it does not."""

from __future__ import annotations

from typing import Any

import pytest

from lab.soak.evidence import Absence, Outcome
from lab.soak.invariants import INVARIANTS, judged
from tests.lab.soak.logs import D, P, answer, evidence, fault, leg, line, sample, workers


def wrong(**fields: Any) -> dict[str, list[str]]:
    """Return the violations of evidence with these changes, by invariant."""
    return {one.name: texts for one, texts in judged(evidence(**fields)).items() if texts}


def gauge(name: str, value: float, **labels: str) -> dict[Any, float]:
    return {(f"pdproxy_{name}", tuple(sorted(labels.items()))): value}


def on(instance: str, role: str) -> dict[str, str]:
    return {"address": instance, "role": role}


LEFT = {"outcome": Outcome.LEFT, "status": None, "is_done": False, "has_usage": False}
REFUSED = answer(id="soak-9.1", outcome=Outcome.ERROR, status=503, is_done=False, has_usage=False)
CUT = {"outcome": Outcome.CUT, "is_done": False, "has_usage": False, "ended": 11.1}
RETRIED = [
    leg("prefill", attempt="a0", sent=9.0, answered=None, ended=9.1, status=None, is_whole=False),
    leg("prefill"),
    leg("decode"),
]
CLEAN = [answer(), answer(id="soak-2.300", began=11.2, ended=11.3, is_clean=True, stream=False, is_done=False)]
CLEAN_LINES = [line(), line(id="soak-2.300")]


def test_names_and_explanations_are_complete() -> None:
    assert [invariant.name for invariant in INVARIANTS] == [f"I{number}" for number in range(1, 16)]
    assert all(invariant.how.endswith(".") for invariant in INVARIANTS)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"answers": [answer(**LEFT)], "lines": [line(code=499, term="CD")], "rest": sample(metrics={
            ("pdproxy_requests_total", (("api", "chat"), ("code", "200"))): 0.0,
            ("pdproxy_requests_total", (("api", "chat"), ("code", "499"))): 1.0,
            ("pdproxy_request_end_total", (("term", "--"),)): 0.0,
            ("pdproxy_request_end_total", (("term", "CD"),)): 1.0,
        }), "legs": []},
        {"answers": [answer(), REFUSED], "rest": sample(metrics=gauge("log_lines_suppressed_total", 1))},
        {"legs": RETRIED, "lines": [line(attempts=2)]},
        {"legs": [leg("prefill"), leg("decode", edited=("kv_transfer_params", "stream")), leg("release", user="")]},
        {"legs": [leg("prefill", edited=("n", "max_tokens")), leg("decode")], "answers": [answer(units=2)]},
        {"absences": [Absence(instance=D, began=8.0, ended=9.5, why="was removed")]},
        {"absences": [Absence(instance=D, began=10.2, ended=15.0, why="was removed")]},
        {"samples": [sample(metrics={
            **gauge("instance_inflight", 2, **on(D, "decode")),
            **gauge("inflight_requests", 3, api="chat"),
        })]},
        {"rest": sample(rss_bytes=65 << 20, fds=44)},
    ],
    ids=[
        "all well", "client left", "flood", "retried", "released", "split", "absent before", "removed in the middle",
        "busy", "a little more",
    ],
)  # fmt: skip
def test_correct_evidence_has_no_violations(fields: dict[str, Any]) -> None:
    assert wrong(**fields) == {}


@pytest.mark.parametrize(
    ("name", "text", "fields"),
    [
        ("I1", "2 access lines", {"lines": [line(), line()]}),
        ("I1", "without a client", {"lines": [line(), line(id="other")]}),
        ("I1", "no access line, and the client got complete", {"lines": []}),
        ("I1", "no access line, and the client got error", {"answers": [answer(), REFUSED]}),
        ("I2", "is -1", {"samples": [sample(metrics=gauge("instance_inflight", -1, **on(D, "decode")))]}),
        ("I2", "2 decode legs were answered, and 1 leases",
         {"legs": [leg("decode"), leg("decode", is_finished=False)]}),
        ("I3", "0 requests have 0 prefillers and 1 decoders",
         {"samples": [sample(metrics=gauge("instance_inflight", 1, **on(D, "decode")))]}),
        ("I3", "1 prefillers and 0 decoders",
         {"samples": [sample(metrics=gauge("instance_inflight", 1, **on(P, "prefill")))]}),
        ("I4", "kv", {"rest": sample(metrics=gauge("instance_load_tokens", 7, kind="kv", **on(D, "decode")))}),
        ("I4", "pdproxy_inflight_requests", {"rest": sample(metrics=gauge("inflight_requests", 1, api="chat"))}),
        ("I4", "running is 1", {"engines": {D: {"live": 0, "running": 1, "waiting": 0}}}),
        ("I5", "text of choice 0", {"answers": [answer(outcome=Outcome.WRONG, problem="text of choice 0 is …")]}),
        ("I5", "2 decodes succeeded for 1",
         {"legs": [leg("prefill"), leg("decode"), leg("decode", attempt="a2", edited=())]}),
        ("I6", "ends with [DONE], and the log says SD", {"lines": [line(term="SD")]}),
        ("I6", "lacks [DONE], and the log says --", {"answers": [answer(is_done=False, outcome=Outcome.CUT)]}),
        ("I7", "the client got 200, and the log says 502", {"lines": [line(code=502)]}),
        ("I7", "1 counted, 0 written", {"lines": [line(api="completions")]}),
        ("I7", "pdproxy_request_end_total", {"lines": [line(term="CD")]}),
        ("I8", "2.000 s after its end", {"legs": [leg("prefill", attempt="a2", sent=14.0), leg("decode")]}),
        ("I9", "after 127.0.0.1:7200 was removed",
         {"absences": [Absence(instance=D, began=8.0, ended=15.0, why="was removed")]}),
        ("I10", "21 attempts, 20 are allowed", {"lines": [line(attempts=21)]}),
        ("I10", "3 prefill legs in 1 attempts", {"legs": [*RETRIED, leg("prefill", sent=10.1, status=500)]}),
        ("I11", "6.0 s from the prefill", {"legs": [leg("prefill"), leg("decode", answered=16.5)]}),
        ("I11", "from the prefill", {"legs": [leg("prefill"), leg("decode", sent=16.5, answered=None, ended=17.0)]}),
        ("I12", "the decode leg has other temperature", {"legs": [leg("decode", edited=("temperature", "stream"))]}),
        ("I12", "the prefill leg has other order", {"legs": [leg("prefill", edited=("order",)), leg("decode")]}),
        ("I12", "the decode leg has other prompt", {"legs": [leg("decode", edited=("prompt",))]}),
        ("I13", "lacks usage", {"answers": [answer(has_usage=False)]}),
        ("I13", "has usage", {"answers": [answer(asks_usage=False)]}),
        ("I14", "not all instances came back",
         {"faults": [fault(is_healed=False)], "answers": CLEAN, "lines": CLEAN_LINES}),
        ("I14", "no clean request", {"faults": [fault()]}),
        ("I15", "40 file descriptors before, 60 after", {"rest": sample(fds=60)}),
        ("I15", "60 MiB before, 90 MiB after", {"rest": sample(rss_bytes=90 << 20)}),
        ("I15", "grows by 2.0 MiB a minute",
         {"samples": [sample(5.0 + 60 * m, rss_bytes=(60 + 2 * m) << 20) for m in range(20)]}),
    ],
)  # fmt: skip
def test_violation_is_reported(name: str, text: str, fields: dict[str, Any]) -> None:
    found = wrong(**fields)
    assert any(text in one for one in found.get(name, ())), found


def test_fault_without_effect_is_no_violation() -> None:
    assert "I14" not in wrong(faults=[fault()], answers=CLEAN, lines=CLEAN_LINES)


def test_answers_cut_by_a_killed_worker_are_counted_separately() -> None:
    cut = {"answers": [answer(**CUT)], "lines": []}
    assert "I1" in wrong(**cut)
    assert "I1" in wrong(**cut, faults=[fault("kill worker", began=13.0)])
    killed = evidence(**cut, faults=[fault("kill worker")], limits=workers(2))
    assert not killed.failures
    assert "I1" not in wrong(**cut, faults=[fault("kill worker")], limits=workers(2))
    assert "I1" not in wrong(lines=[], faults=[fault("kill worker", began=12.05)], limits=workers(2))
    assert "I1" in wrong(lines=[], faults=[fault("kill worker", began=12.2)], limits=workers(2))


def test_answer_that_two_faults_made_suspect_is_no_failure() -> None:
    first, second = fault("kill", target="decode 127.0.0.1:1"), fault("kill", target="decode 127.0.0.1:2")
    lines = [line(lost_engines=2)]
    for outcome in (Outcome.ERROR, Outcome.CUT):
        stopped = answer(outcome=outcome)
        assert not evidence(answers=[stopped], faults=[first, second], lines=lines).failures
        assert evidence(answers=[stopped], faults=[first, first], lines=lines).failures == [stopped]
        assert evidence(answers=[stopped], faults=[first, second]).failures == [stopped]
    wrong_answer = answer(outcome=Outcome.WRONG)
    assert evidence(answers=[wrong_answer], faults=[first, second], lines=lines).failures == [wrong_answer]


def test_answer_may_be_resumed_or_repeated_as_it_ends() -> None:
    def twice(sent: float, attempts: int) -> bool:
        legs = [leg("prefill"), leg("decode", ended=11.0), leg("decode", attempt="a2", sent=sent)]
        return "I5" in wrong(legs=legs, lines=[line(attempts=attempts)])

    assert [twice(11.1, 2), twice(11.1, 1), twice(11.8, 2)] == [False, True, True]


def test_invariants_skip_loads_with_several_workers() -> None:
    not_judged = [one.name for one, verdict in judged(evidence(limits=workers(2))).items() if verdict is None]
    assert not_judged == ["I3"]


def test_late_record_is_no_violation() -> None:
    late = [leg("prefill", attempt="a2", sent=14.0), leg("decode")]
    assert "I8" in wrong(legs=late)
    assert "I8" not in wrong(legs=late, judges_lag_seconds=2.0)
    assert "I8" not in wrong(legs=late, samples=[sample(11.0, metrics=gauge("loop_lag_seconds", 2.0))])


def test_recovery_allows_for_a_busy_machine() -> None:
    late = [answer(id="soak-2.300", began=11.2, ended=13.0, is_clean=True, stream=False, is_done=False)]
    usual = [answer(id=f"soak-{n}.300", began=9.0, ended=10.5, is_clean=True) for n in range(3, 8)]
    quick = [*late, *CLEAN[:1], *[answer(began=9.0, ended=9.1, is_clean=True)] * 5]
    assert "I14" in wrong(faults=[fault()], answers=quick)
    assert "I14" not in wrong(faults=[fault()], answers=quick, judges_lag_seconds=3.0)
    assert "I14" not in wrong(faults=[fault()], answers=[*late, *usual])


def test_repeats_are_counted_against_the_budget() -> None:
    """Six of 10 requests have their second prefill at the same time, and 3 may."""
    answers = [answer(id=f"soak-{n}.1") for n in range(10)]
    legs = [leg("prefill", user=f"soak-{n}.1", attempt=f"{n}-1", sent=10.0, ended=10.1) for n in range(10)]
    again = [leg("prefill", user=f"soak-{n}.1", attempt=f"{n}-2", sent=10.2, answered=11.0) for n in range(6)]
    one_by_one = [
        leg("prefill", user=f"soak-{n}.1", attempt=f"{n}-2", sent=10.2 + n, answered=10.9 + n) for n in range(6)
    ]
    lines = [line(id=f"soak-{n}.1", attempts=2) for n in range(10)]
    found = wrong(answers=answers, legs=legs + again, lines=lines)["I10"]
    assert found == ["6 of 10 requests were being repeated at the same time"]
    assert "I10" not in wrong(answers=answers, legs=legs + one_by_one, lines=lines)
    assert "I10" not in wrong(answers=answers, legs=legs + again, lines=lines, limits=workers(2))


def test_only_a_resumed_answer_may_have_another_prompt() -> None:
    legs = [leg("decode"), leg("decode", attempt="a2", sent=11.0, edited=("prompt", "max_tokens"), is_finished=False)]
    assert "I12" in wrong(legs=legs)
    assert "I12" not in wrong(legs=legs, lines=[line(resumes=1)])
    first = [leg("decode", edited=("prompt",))]
    assert "I12" in wrong(legs=first, lines=[line(resumes=1)])
