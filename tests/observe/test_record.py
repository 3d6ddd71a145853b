"""Records of requests, and their access lines."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.common.backend import Role
from proxy.common.errors import NoBackendAvailable
from proxy.common.terms import Stage
from proxy.observe.record import FACTS, AccessFacts, RequestRecord, access_line, fact_values_of
from proxy.observe.timeline import ATTEMPT_ATTRIBUTES, AttemptRecord, Timeline, stage_seconds

if TYPE_CHECKING:
    from proxy.observe.timeline import Marks
    from tests.clock import Clock


@pytest.fixture
def record(clock: Clock) -> RequestRecord:
    record = RequestRecord("chat", "r1", clock=clock)
    record.stream = True
    return record


def line(record: RequestRecord) -> dict[str, object]:
    """End the request now, and return its access line."""
    record.ended = record.clock()
    record.close_record()
    return access_line(record.facts)


def walk(timeline: Timeline, clock: Clock, *steps: tuple[Stage | None, float]) -> None:
    for stage, seconds in steps:
        if stage is None:
            timeline.end_attempt()
        else:
            timeline.enter_stage(stage)
        clock.now += seconds


def test_timeline_measures_each_stage(record: RequestRecord, clock: Clock) -> None:
    timeline = record.add_timeline()
    walk(
        timeline,
        clock,
        (Stage.PREFILL, 2.0),
        (Stage.HANDOFF, 0.5),
        (Stage.FIRST_TOKEN, 0.25),
        (Stage.STREAM, 8.0),
        (None, 100.0),
    )
    assert timeline.seconds_by_stage == {
        Stage.PREFILL: 2.0,
        Stage.HANDOFF: 0.5,
        Stage.FIRST_TOKEN: 0.25,
        Stage.STREAM: 8.0,
    }
    assert timeline.current_stage is Stage.STREAM


def test_time_of_a_repeated_stage_is_summed(record: RequestRecord, clock: Clock) -> None:
    timeline = record.add_timeline()
    walk(timeline, clock, (Stage.PREFILL, 1.0), (Stage.PREFILL, 2.0), (None, 0.0))
    assert timeline.seconds_by_stage == {Stage.PREFILL: 3.0}


@given(
    st.lists(st.tuples(st.none() | st.sampled_from(Stage), st.integers(0, 1000))),
    st.dictionaries(st.sampled_from(Stage), st.integers(0, 1000)),
)
def test_seconds_of_a_stage_are_the_sum_of_its_visits(steps: Marks, before: dict[Stage, float]) -> None:
    spent = defaultdict(float, before)
    for (stage, entered), (_, left) in pairwise(steps):
        if stage is not None:
            spent[stage] += left - entered
    assert stage_seconds(steps, before) == dict(spent)


def test_new_attempt_is_empty(record: RequestRecord, clock: Clock) -> None:
    timeline = record.add_timeline()
    timeline.begin_attempt()
    timeline.prefiller, timeline.decoder = "p:1", "d:1"
    walk(timeline, clock, (Stage.PREFILL, 5.0), (Stage.HANDOFF, 1.0))
    timeline.begin_attempt()
    assert (timeline.current_stage, timeline.prefiller, timeline.decoder, timeline.attempts) == (None, "-", "-", 2)
    (first,) = timeline.past_attempts
    assert (first.prefiller, first.decoder, [stage for stage, _ in first.stage_marks]) == (
        *("p:1", "d:1"),
        [Stage.PREFILL, Stage.HANDOFF],
    )
    walk(timeline, clock, (Stage.PREFILL, 1.0), (None, 0.0))
    assert timeline.seconds_by_stage == {Stage.PREFILL: 1.0}


def test_attempt_that_resumes_an_answer_adds_to_its_times(record: RequestRecord, clock: Clock) -> None:
    timeline = record.add_timeline()
    timeline.begin_attempt()
    walk(timeline, clock, (Stage.PREFILL, 5.0), (Stage.STREAM, 1.0), (None, 0.0))
    timeline.usage.is_resumed = True
    timeline.begin_attempt()
    assert (timeline.current_stage, timeline.decoder, timeline.attempts) == (None, "-", 2)
    walk(timeline, clock, (Stage.PREFILL, 1.0), (Stage.STREAM, 2.0), (None, 0.0))
    assert timeline.seconds_by_stage == {Stage.PREFILL: 6.0, Stage.STREAM: 3.0}


def test_queue_time_is_kept_over_attempts(record: RequestRecord, clock: Clock) -> None:
    timeline = record.add_timeline()
    walk(timeline, clock, (Stage.QUEUE, 4.0))
    timeline.end_attempt()
    timeline.begin_attempt()
    walk(timeline, clock, (Stage.PREFILL, 1.0), (None, 0.0))
    timeline.begin_attempt()
    assert timeline.seconds_by_stage == {Stage.QUEUE: 4.0}


def test_encoding_and_prefill_are_one_attempt(record: RequestRecord, clock: Clock) -> None:
    timeline = record.add_timeline()
    for attempts in (1, 2):
        timeline.begin_encoding_attempt()
        clock.now += 2.0
        timeline.end_encoding()
        timeline.begin_attempt()
        walk(timeline, clock, (Stage.PREFILL, 1.0), (None, 0.0))
        assert (timeline.attempts, timeline.seconds_by_stage) == (attempts, {Stage.ENCODE: 2.0, Stage.PREFILL: 1.0})
    assert line(record)["t_encode"] == 2.0


def test_attempt_may_end_after_encoding(record: RequestRecord) -> None:
    timeline = record.add_timeline()
    timeline.begin_encoding_attempt()
    timeline.end_encoding()
    assert record.current_stage is Stage.ENCODE
    timeline.begin_encoding_attempt()
    assert timeline.attempts == 2


def test_prompt_usage_of_a_resumed_answer_is_ignored() -> None:
    timeline = Timeline()
    timeline.usage.add_prompt_usage({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}})
    timeline.usage.is_resumed = True
    timeline.usage.add_prompt_usage({"prompt_tokens": 17, "prompt_tokens_details": {"cached_tokens": 16}})
    timeline.usage.add_completion_usage({"completion_tokens": 9})
    assert (timeline.usage.prompt_tokens, timeline.usage.cached_tokens, timeline.usage.completion_tokens) == (10, 4, 9)


def test_access_line_sums_the_resumes_of_its_units(record: RequestRecord) -> None:
    record.add_timeline().resumes = 2
    record.add_timeline().resumes = 1
    assert line(record)["resumes"] == 3


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 10, "completion_tokens": 3}, (10, 3)),
        ({"prompt_tokens": 10}, (10, None)),
        ({"prompt_tokens": "10", "completion_tokens": None}, (None, None)),
        ({"prompt_tokens": -10, "completion_tokens": -3}, (None, None)),
        ({"prompt_tokens": True, "completion_tokens": True}, (None, None)),
        ({"prompt_tokens": 2**64 - 1, "completion_tokens": 2**64 - 3}, (None, None)),
        ({}, (None, None)),
        (None, (None, None)),
        ([1], (None, None)),
    ],
)
def test_only_valid_usage_is_recorded(usage: Any, expected: tuple[int | None, int | None]) -> None:
    timeline = Timeline()
    for take in (timeline.usage.add_prompt_usage, timeline.usage.add_completion_usage):
        take(usage)
    assert (timeline.usage.prompt_tokens, timeline.usage.completion_tokens) == expected


def test_only_valid_cached_tokens_are_recorded() -> None:
    for reported, recorded in ((7, 7), (0, 0), (-7, None), (2**64 - 7, None), (True, None), (7.0, None), (None, None)):
        usage = Timeline().usage
        assert usage.add_prompt_usage({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": reported}}) == (
            10,
            recorded,
        )
        assert usage.cached_tokens == recorded


def test_usage_without_numbers_keeps_earlier_values() -> None:
    timeline = Timeline()
    for take in (timeline.usage.add_prompt_usage, timeline.usage.add_completion_usage):
        take({"prompt_tokens": 10, "completion_tokens": 3})
    for take in (timeline.usage.add_prompt_usage, timeline.usage.add_completion_usage):
        take({"completion_tokens": None})
    assert (timeline.usage.prompt_tokens, timeline.usage.completion_tokens) == (10, 3)


def test_only_the_first_token_counts(record: RequestRecord, clock: Clock) -> None:
    clock.now += 1.5
    record.record_first_token()
    clock.now += 1.0
    record.record_first_token()
    assert record.first_token_seconds == 1.5


def test_stage_of_a_request_is_that_of_its_slowest_unit(record: RequestRecord, clock: Clock) -> None:
    assert record.current_stage is None
    walk(record.add_timeline(), clock, (Stage.STREAM, 0.0))
    walk(record.add_timeline(), clock, (Stage.HANDOFF, 0.0))
    record.add_timeline()
    assert record.current_stage is Stage.HANDOFF


def test_tokens_are_summed_over_the_units(record: RequestRecord) -> None:
    first, second = record.add_timeline(), record.add_timeline()
    for take in (first.usage.add_prompt_usage, first.usage.add_completion_usage):
        take({"prompt_tokens": 10, "completion_tokens": 3})
    for take in (second.usage.add_prompt_usage, second.usage.add_completion_usage):
        take({"prompt_tokens": 20, "completion_tokens": 4})
    second.usage.add_prompt_usage({"prompt_tokens_details": {"cached_tokens": 16}})
    record.close_record()
    facts = record.facts
    assert (facts.prompt_tokens, facts.cached_tokens, facts.completion_tokens) == (30, 16, 7)


def test_access_line_of_a_complete_request(record: RequestRecord, clock: Clock) -> None:
    timeline = record.add_timeline()
    timeline.begin_attempt()
    timeline.prefiller, timeline.decoder, timeline.kv = "p:1", "d:1", "transferred"
    timeline.prefill_id = timeline.decode_id = "a1"
    walk(timeline, clock, (Stage.PREFILL, 2.0), (Stage.HANDOFF, 0.5), (Stage.FIRST_TOKEN, 0.25))
    record.record_first_token()
    walk(timeline, clock, (Stage.STREAM, 8.0), (None, 0.0))
    for take in (timeline.usage.add_prompt_usage, timeline.usage.add_completion_usage):
        take({"prompt_tokens": 10, "completion_tokens": 3})
    clock.now += 0.000049
    assert line(record) == {
        "id": "r1",
        "key": "-",
        "client": "-",
        "api": "chat",
        "stream": True,
        "code": 200,
        "term": "--",
        "p": "p:1",
        "d": "d:1",
        "p_id": "a1",
        "d_id": "a1",
        "kv": "transferred",
        "units": 1,
        "attempts": 1,
        "resumes": 0,
        "t_queue": 0.0,
        "t_prefill": 2.0,
        "t_handoff": 0.5,
        "t_first_token": 0.25,
        "t_stream": 8.0,
        "ttft": 2.75,
        "dur": 10.75,
        "tokens_in": 10,
        "tokens_cached": 0,
        "tokens_out": 3,
        "error": None,
    }


def test_access_line_of_several_units_has_the_longest_stages(record: RequestRecord, clock: Clock) -> None:
    for decoder, seconds in (("d:1", 1.0), ("d:2", 3.0)):
        timeline = record.add_timeline()
        timeline.begin_attempt()
        timeline.begin_attempt()
        timeline.decoder = decoder
        walk(timeline, clock, (Stage.STREAM, seconds), (None, 0.0))
    fields = line(record)
    assert (fields["d"], fields["units"], fields["attempts"], fields["t_stream"]) == ("d:1", 2, 4, 3.0)


def test_access_line_of_a_request_without_an_instance(record: RequestRecord) -> None:
    record.error = NoBackendAvailable(Role.DECODE)
    fields = line(record)
    assert (fields["p"], fields["d"], fields["units"], fields["attempts"], fields["ttft"]) == ("-", "-", 0, 0, None)
    assert (fields["term"], fields["code"]) == ("PR", 503)
    assert fields["error"] == "no healthy decode instance is available"


def test_access_line_has_no_error_without_a_message_for_clients(record: RequestRecord) -> None:
    record.error = RuntimeError("my-secret-prompt")
    assert line(record)["error"] is None


@pytest.mark.interpreted
def test_moved_attributes_are_all_attributes_of_an_attempt() -> None:
    assert set(ATTEMPT_ATTRIBUTES) == set(AttemptRecord.__annotations__)


@pytest.mark.interpreted
def test_values_of_facts_are_in_the_order_of_their_names() -> None:
    facts: dict[str, Any] = {name: name for name in FACTS}
    assert fact_values_of(AccessFacts(**facts)) == FACTS
