"""The verdict on the gateway: which facts are a reason, how bad it is, and what it names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.balancer.backend_health import HealthState
from proxy.observe.verdict import (
    CODES,
    PACE_WINDOW_SECONDS,
    InstanceFacts,
    StatusBoard,
    StatusFacts,
    StatusLevel,
    StatusReason,
    StatusVerdicts,
    WorkerFacts,
    judge_status,
    level_of,
)
from proxy.process.worker.status import CounterGrowth

UP = {HealthState.UP: 1}
PREFILL = InstanceFacts(role="prefill", name="p:1", states=UP)
DECODE = InstanceFacts(role="decode", name="d:1", states=UP)
OTHER = replace(DECODE, name="d:2")
WELL = StatusFacts(roles=("prefill", "decode"), instances=(PREFILL, DECODE, OTHER), workers=(WorkerFacts(number=0),))


def with_decoder(**changes: object) -> StatusFacts:
    return replace(WELL, instances=(PREFILL, replace(DECODE, **changes), OTHER))  # type: ignore[arg-type]


def with_worker(**changes: object) -> StatusFacts:
    return replace(WELL, workers=(WorkerFacts(number=0), WorkerFacts(number=1, **changes)))  # type: ignore[arg-type]


PACES: dict[tuple[str, ...], float] = {
    ("stream_parts", "d:1"): 100.0,
    ("stream_seconds", "d:1"): 30.0,
    ("stream_parts", "d:2"): 100.0,
    ("stream_seconds", "d:2"): 2.0,
}
MOSTLY_OK: dict[tuple[str, ...], float] = {
    ("instance_requests", "decode", "d:1", "status"): 3.0,
    ("instance_requests", "decode", "d:1", "ok"): 97.0,
}
SLOWER: dict[tuple[str, ...], float] = {**PACES, ("stream_seconds", "d:1"): 5.9}
FLOOD = replace(with_worker(queued=9, oldest_seconds=3.0, waits_for="prefill"), keys={"team-a": 2, "team-b": 30})

LATE_PREFILL = replace(
    WELL,
    instances=(
        PREFILL,
        replace(PREFILL, name="p:2"),
        replace(PREFILL, name="p:3", quiet_seconds=(15,), answers=4, work_seconds=2.0),
        DECODE,
    ),
    counts={("instance_requests", "prefill", name, "ok"): 5.0 for name in ("p:1", "p:2")},
)
ROWS = [
    (replace(WELL, instances=(PREFILL,)), "no_instance", "decode", StatusLevel.DOWN, "There is no decode instance."),
    (
        replace(WELL, instances=(PREFILL, replace(DECODE, states={HealthState.DOWN: 1}))),
        "no_instance",
        "decode",
        StatusLevel.DOWN,
        "The only decode instance is not up.",
    ),
    (
        replace(WELL, instances=(PREFILL, *(replace(each, states={HealthState.DOWN: 1}) for each in (DECODE, OTHER)))),
        "no_instance",
        "decode",
        StatusLevel.DOWN,
        "None of the 2 decode instances is up.",
    ),
    (
        with_decoder(states={HealthState.DOWN: 1}, cause="refused"),
        "instance_down",
        "d:1",
        StatusLevel.DEGRADED,
        "refused",
    ),
    (
        with_decoder(states={HealthState.EJECTED: 1, HealthState.UP: 2}),
        "instance_ejected",
        "d:1",
        StatusLevel.DEGRADED,
        "in 1 of 3 workers",
    ),
    (
        with_decoder(quiet_seconds=(9.2,), answers=1),
        "instance_silent",
        "d:1",
        StatusLevel.DEGRADED,
        "for 9 s on 1 of 1 r",
    ),
    (
        with_decoder(quiet_seconds=(9.0, 6.0, 5.5, 1.0), answers=12),
        "instance_silent",
        "d:1",
        StatusLevel.DEGRADED,
        "for 9 s on 3 of 12 running answers.",
    ),
    (
        with_decoder(quiet_seconds=(61.0,), answers=1, has_begun=False),
        "instance_silent",
        "d:1",
        StatusLevel.DEGRADED,
        "for 61 s on 1 of 1 running answer.",
    ),
    (LATE_PREFILL, "instance_silent", "p:3", StatusLevel.DEGRADED, "for 15 s; 4 under way, which should take 2.0 s."),
    (
        replace(WELL, instances=(replace(PREFILL, quiet_seconds=(61,), answers=1, work_seconds=3.0), DECODE)),
        "instance_silent",
        "p:1",
        StatusLevel.DEGRADED,
        "for 61 s; 1 under way, which should take 3.0 s.",
    ),
    (
        replace(WELL, counts={("instance_requests", "decode", "d:1", "status"): 4.0}),
        "instance_failing",
        "d:1",
        StatusLevel.DEGRADED,
        "failed 4 of 4 requests in 30 s: status.",
    ),
    (with_decoder(is_refusing=True), "instance_refuses", "d:1", StatusLevel.DEGRADED, "429"),
    (replace(WELL, counts=PACES), "instance_slow", "d:1", StatusLevel.DEGRADED, "takes 300 ms per token"),
    (
        replace(WELL, counts={("instance_requests", "decode", "d:1", "recomputed"): 2.0}),
        "kv_memory",
        "d:1",
        StatusLevel.DEGRADED,
        "preempted 2 answers",
    ),
    (
        with_decoder(hints={"model": "serves b", "role": "is a prefiller"}),
        "incompatible",
        "d:1",
        StatusLevel.DEGRADED,
        "is incompatible: model: serves b; role: is a prefiller",
    ),
    (replace(WELL, pairs_apart={("p:1", "d:1"): 8.0}), "pair_apart", "p:1 d:1", StatusLevel.DEGRADED, "another 8 s"),
    (
        with_decoder(computes_from=("p:1",)),
        "pair_recomputes",
        "p:1 d:1",
        StatusLevel.DEGRADED,
        "computes prompts again",
    ),
    (
        with_decoder(slow_from={"p:1": (1.5, 0.1)}),
        "pair_slow",
        "p:1 d:1",
        StatusLevel.DEGRADED,
        "take 1.50 s, those of",
    ),
    (
        with_worker(queued=243, oldest_seconds=9.6, waits_for="prefill"),
        "queue",
        "prefill",
        StatusLevel.IMPAIRED,
        "243 requests wait for room at a prefill instance, the longest for 9.6 s.",
    ),
    (
        with_worker(queued=1, oldest_seconds=2.5),
        "queue",
        "prefill",
        StatusLevel.IMPAIRED,
        "1 request waits for a better prefill instance",
    ),
    (
        with_worker(turns=12, oldest_turn_seconds=45.0),
        "sessions",
        "prefill",
        StatusLevel.IMPAIRED,
        "12 turns of sessions wait for room in a prefix cache, the longest for 45 s.",
    ),
    (
        replace(WELL, counts={("rejected", "queue_full"): 3.0}),
        "rejected",
        "queue_full",
        StatusLevel.IMPAIRED,
        "3 requests rejected in 30 s: queue_full.",
    ),
    (
        replace(WELL, counts={("requests", "chat", "502"): 2.0, ("requests", "chat", "200"): 8.0}),
        "errors",
        "requests",
        StatusLevel.IMPAIRED,
        "2 of 10 requests failed in 30 s: 2 with a 5xx status",
    ),
    (
        replace(WELL, counts={("streams_broken", "engine", "broken"): 1.0}),
        "errors",
        "requests",
        StatusLevel.IMPAIRED,
        "1 br",
    ),
    (
        replace(WELL, counts={("resumes", "stalled", "ids"): 2.0, ("resumes", "stalled", "replay"): 1.0}),
        "resumed",
        "stalled",
        StatusLevel.DEGRADED,
        "3 answers continued",
    ),
    (FLOOD, "key_dominates", "team-b", StatusLevel.DEGRADED, "30 of 32 requests in flight (94%)"),
    (
        replace(WELL, counts={("key_limited", "team-b"): 294.0}),
        "key_limited",
        "team-b",
        StatusLevel.DEGRADED,
        "294 requests",
    ),
    (with_worker(overload=2, memory_share=0.96), "memory", "memory", StatusLevel.DOWN, "96%"),
    (with_worker(memory_share=0.91), "memory", "memory", StatusLevel.DEGRADED, "91%"),
    (with_worker(lag_seconds=0.7), "event_loop", "1", StatusLevel.DEGRADED, "0.7 s late"),
    (with_worker(fds_share=0.85), "file_descriptors", "1", StatusLevel.DEGRADED, "85%"),
    (with_worker(age_seconds=7.0), "worker_silent", "1", StatusLevel.IMPAIRED, "not reported for 7 s"),
    (
        replace(WELL, counts={("worker_replacements", "died"): 1.0}),
        "worker_replaced",
        "died",
        StatusLevel.DEGRADED,
        "died",
    ),
    (replace(WELL, sources={"dns:x": "no such name"}), "discovery", "dns:x", StatusLevel.DEGRADED, "no such name"),
    (with_worker(is_reload_refused=True), "reload", "configuration", StatusLevel.DEGRADED, "refused"),
    (replace(WELL, exchange_age_seconds=20.0), "replicas", "replicas", StatusLevel.DEGRADED, "for 20 s"),
]


@pytest.mark.parametrize(("facts", "code", "subject", "level", "words"), ROWS)
def test_verdict_names_the_problem(facts: StatusFacts, code: str, subject: str, level: StatusLevel, words: str) -> None:
    reasons = judge_status(facts)
    assert level_of(reasons) is max(reason.level for reason in reasons)
    (found,) = [reason for reason in reasons if reason.code == code]
    assert (found.subject, found.level) == (subject, level)
    assert words in found.text


def test_failures_and_pairs_of_an_instance_that_is_down_are_no_further_reasons() -> None:
    facts = replace(
        with_decoder(states={HealthState.EJECTED: 1}),
        counts={("instance_requests", "decode", "d:1", "status"): 4.0},
        pairs_apart={("p:1", "d:1"): 8.0},
    )
    assert [reason.code for reason in judge_status(facts)] == ["instance_ejected"]


def test_pairs_of_a_decoder_that_fails_with_all_prefillers_are_no_further_reasons() -> None:
    """A decoder that answers 500 is the cause, not its links. It is ejected only later."""
    facts = replace(
        WELL,
        instances=(PREFILL, replace(PREFILL, name="p:2"), DECODE, OTHER),
        counts={("instance_requests", "decode", "d:1", "status"): 4.0},
        pairs_apart={("p:1", "d:1"): 8.0, ("p:2", "d:1"): 8.0},
    )
    assert [reason.code for reason in judge_status(facts)] == ["instance_failing"]
    one = replace(facts, pairs_apart={("p:1", "d:1"): 8.0})
    assert sorted(reason.code for reason in judge_status(one)) == ["instance_failing", "pair_apart"]


def test_every_code_has_a_row() -> None:
    assert {code for _, code, *_ in ROWS} == set(CODES)


@pytest.mark.parametrize(
    "facts",
    [
        WELL,
        with_decoder(quiet_seconds=(9.0, 9.0, 4.9), answers=3),
        with_decoder(quiet_seconds=(55.0, 20.0), answers=2, has_begun=False),
        with_decoder(quiet_seconds=(7.0, 7.0), answers=2),
        with_worker(turns=3, oldest_turn_seconds=20.0),
        with_decoder(slow_from={"p:1": (0.5, 0.1)}),
        with_decoder(slow_from={"p:1": (1.1, 0.5)}),
        with_worker(queued=50, oldest_seconds=1.9, waits_for="decode"),
        replace(FLOOD, workers=(WorkerFacts(number=0),)),
        replace(WELL, counts={("rejected", "invalid_request"): 9.0, ("requests", "chat", "400"): 9.0}),
        replace(WELL, counts={("streams_broken", "client", "left"): 3.0}),
        replace(WELL, counts=MOSTLY_OK),
        replace(WELL, counts=SLOWER),
        replace(WELL, instances=(replace(PREFILL, quiet_seconds=(40.0,), answers=1, work_seconds=3.0), DECODE)),
        replace(LATE_PREFILL, counts={}),
        replace(
            WELL,
            instances=(PREFILL, replace(DECODE, quiet_seconds=(19.0,), answers=1), OTHER),
            counts={("stream_parts", "d:1"): 20.0, ("stream_seconds", "d:1"): 20.0},
        ),
        replace(WELL, exchange_age_seconds=3.0),
    ],
)  # fmt: skip
def test_verdict_is_healthy_without_a_problem(facts: StatusFacts) -> None:
    assert judge_status(facts) == []


def test_slow_decoder_is_found_by_its_recent_pace() -> None:
    """It was fast before its restart, and its recent tokens are few."""
    before: dict[tuple[str, ...], float] = {
        ("stream_parts", "d:1"): 900.0,
        ("stream_seconds", "d:1"): 27.0,
        ("stream_parts", "d:2"): 900.0,
        ("stream_seconds", "d:2"): 18.0,
    }
    recent = {**before, ("stream_parts", "d:1"): 30.0, ("stream_seconds", "d:1"): 9.0}
    assert judge_status(replace(WELL, counts=before)) == []
    (reason,) = judge_status(replace(WELL, counts=before, recent_paces=recent))
    assert reason.text == "decode d:1 takes 300 ms per token, other decoders take 20 ms."
    assert judge_status(replace(WELL, counts=before, recent_paces={**recent, ("stream_parts", "d:1"): 29.0})) == []


Pace = tuple[float, float]
"""Parts of streams, and the seconds between them."""


def with_paces(steps: Sequence[Pace], before: Pace = (200.0, 5.0)) -> StatusFacts:
    """Return facts with the paces of d:1 at the latest verdicts, beside a fast d:2. `before`: its pace until then."""

    def counts(parts: float, seconds: float) -> dict[tuple[str, ...], float]:
        others: dict[tuple[str, ...], float] = {("stream_parts", "d:2"): 400.0, ("stream_seconds", "d:2"): 10.0}
        return {**others, ("stream_parts", "d:1"): parts, ("stream_seconds", "d:1"): seconds}

    parts, seconds = sum(step[0] for step in steps), sum(step[1] for step in steps)
    return replace(
        WELL,
        counts=counts(parts + before[0], seconds + before[1]),
        recent_paces=counts(parts, seconds),
        pace_steps=[counts(*step) if step[0] else {} for step in steps],
    )


@pytest.mark.parametrize(
    ("steps", "before", "is_slow"),
    [
        ([(0, 0), (7, 2), (3, 1)], (160, 4), True),
        ([(7, 2), (3, 1)], (0, 0), True),
        ([(5, 1.5), (4, 1.2)], (160, 4), False),  # too few tokens
        ([(0, 0), (10, 3)], (0, 0), False),  # one pause explains them
        ([(10, 0.25), (7, 2), (3, 1)], (160, 4), False),  # some are fast
        ([(7, 0.5), (7, 0.5)], (0, 0), False),  # not three times as slow
    ],
)
def test_slow_decoder_with_few_tokens_is_named_after_two_verdicts(
    steps: list[Pace], before: Pace, is_slow: bool
) -> None:
    """A decoder that has just returned gets few requests, and its earlier tokens hide its pace."""
    found = [(reason.code, reason.subject) for reason in judge_status(with_paces(steps, before))]
    assert found == ([("instance_slow", "d:1")] if is_slow else [])


@given(
    gaps=st.lists(st.floats(0.005, 0.07), min_size=2, max_size=6),
    parts=st.lists(st.integers(1, 4), min_size=2, max_size=6),
    pause_seconds=st.floats(0.0, 8.0),
    data=st.data(),
)
def test_pause_makes_no_decoder_with_few_tokens_slow(
    gaps: list[float], parts: list[int], pause_seconds: float, data: st.DataObject
) -> None:
    steps = [(float(count), count * data.draw(st.sampled_from(gaps))) for count in parts]
    paused = data.draw(st.integers(0, len(steps) - 1))
    steps[paused] = steps[paused][0], steps[paused][1] + pause_seconds
    assert judge_status(with_paces(steps, (0.0, 0.0))) == []


@given(
    gap=st.floats(0.1, 0.35),
    first_request_at=st.floats(0.0, 6.5),
    down_seconds=st.floats(1.0, 10.0),
    sweep_phase=st.floats(0.0, 1.0),
    verdict_phase=st.floats(0.0, 2.0),
)
def test_decoder_that_returns_slow_is_named_within_15_seconds(
    gap: float, first_request_at: float, down_seconds: float, sweep_phase: float, verdict_phase: float
) -> None:
    """One stream at a time is enough. The times are seconds after the return."""
    window, total = CounterGrowth(PACE_WINDOW_SECONDS), CounterGrowth()
    named_at = None
    for verdict in range(20):
        now = 2.0 * verdict - 24.0 + verdict_phase
        # Counters as of the last check of silence, which the worker has reported within 1 s.
        checked_at = math.floor(now - 1.0 - sweep_phase) + sweep_phase
        fast_seconds = max(0.0, min(checked_at, -down_seconds) + 30.0)
        slow_seconds = max(0.0, checked_at - math.ceil(first_request_at + 0.5 - sweep_phase) - sweep_phase)
        row: dict[tuple[str, ...], float] = {
            ("", "stream_parts", "d:1"): fast_seconds * 40 + math.floor(slow_seconds / gap),
            ("", "stream_seconds", "d:1"): fast_seconds + slow_seconds,
            ("", "stream_parts", "d:2"): (now + 30.0) * 40,
            ("", "stream_seconds", "d:2"): now + 30.0,
        }
        counts, recent = total.add_values(now, row), window.add_values(now, row)
        reasons = judge_status(replace(WELL, counts=counts, recent_paces=recent, pace_steps=window.steps))
        if reasons and named_at is None:
            named_at = now
        assert bool(reasons) <= (now > first_request_at)
    assert named_at is not None
    assert named_at <= 15.0


def test_reason_keeps_its_first_time_and_is_held_for_six_seconds() -> None:
    verdicts = StatusVerdicts()
    reasons = judge_status(replace(WELL, sources={"dns:x": "no such name"}))
    first = verdicts.update_verdict(reasons, 10.0, 1000.0)
    assert first["state"] == "degraded"
    assert first["reasons"] == [
        {
            "code": "discovery",
            "level": "degraded",
            "text": "The discovery source dns:x cannot be read; its last known instances stay: no such name",
            "subject": {"kind": "source", "name": "dns:x"},
            "since": 1000.0,
            "look_at": "the source itself: its file, its DNS name or the API of Kubernetes",
        }
    ]
    assert verdicts.update_verdict(reasons, 12.0, 1002.0)["reasons"][0]["since"] == 1000.0
    assert verdicts.update_verdict([], 17.0, 1007.0)["state"] == "degraded"
    assert verdicts.update_verdict([], 19.0, 1009.0) == {
        "state": "healthy",
        "at": 1009.0,
        "reasons": [],
        "omitted": 0,
    }


def test_verdict_with_the_longest_reasons_fits_into_its_memory() -> None:
    reasons = [
        StatusReason(StatusLevel.DOWN, "instance_down", "instance", f"{n}" + "\x01" * 999, "\x01" * 9999)
        for n in range(1000)
    ]
    verdict = StatusVerdicts().update_verdict(reasons, 1.0, 1.0)
    assert (len(verdict["reasons"]), verdict["omitted"]) == (200, 800)
    assert verdict["reasons"][0]["text"].endswith("\x01…")
    board = StatusBoard()
    board.publish_verdict(verdict, 1.0)
    assert board.current_verdict(1.0) == verdict


def test_report_that_is_too_long_loses_the_end_of_its_longest_lists() -> None:
    board = StatusBoard()
    counts = [["instance_requests", "decode", f"{number:0255}", "ok", 1.0] for number in range(9000)]
    quiet = {f"{number:0255}": [1, 0.0, True] for number in range(9000)}
    assert not board.publish_report(
        0, {"at": 1.0, "waits_for": "x" * 9999, "counts": counts, "quiet": quiet, "apart": []}
    )
    report = board.latest_reports()[0]
    assert report["counts"] == counts[: len(report["counts"])]
    assert 1000 < len(report["counts"]) < 9000
    assert list(report["quiet"]) == list(quiet)[: len(report["quiet"])]
    assert board.publish_report(0, {"at": 1.0, "counts": counts[:100], "quiet": {}, "apart": []})


def test_verdict_names_the_worker_that_judges_when_it_is_blocked() -> None:
    board = StatusBoard()
    board.publish_verdict(StatusVerdicts().update_verdict(judge_status(WELL), 10.0, 1000.0), 10.0)
    assert board.current_verdict(14.0)["state"] == "healthy"
    late = board.current_verdict(18.0)
    assert late["state"] == "impaired"
    (reason,) = late["reasons"]
    assert (reason["code"], reason["subject"]) == ("worker_silent", {"kind": "worker", "name": "0"})
    assert reason["text"].startswith("The state is 8 s old")
