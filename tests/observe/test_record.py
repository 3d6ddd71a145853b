"""What the access line and the metrics are told about a request."""

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
from proxy.observe.record import FACTS, AccessFacts, RequestRecord, access_line, values_of
from proxy.observe.timeline import OF_AN_ATTEMPT, AttemptRecord, Timeline, seconds_of

if TYPE_CHECKING:
    from proxy.observe.timeline import Marks
    from tests.clock import Clock


@pytest.fixture
def record(clock: Clock) -> RequestRecord:
    record = RequestRecord("chat", "r1", clock=clock)
    record.stream = True
    return record


def line(record: RequestRecord) -> dict[str, object]:
    """Its access line, as it ends now."""
    record.ended = record.clock()
    record.close()
    return access_line(record.facts)


def walk(timeline: Timeline, clock: Clock, *steps: tuple[Stage | None, float]) -> None:
    for stage, seconds in steps:
        if stage is None:
            timeline.leave()
        else:
            timeline.enter(stage)
        clock.now += seconds


def test_a_timeline_knows_how_long_each_stage_took(record: RequestRecord, clock: Clock) -> None:
    timeline = record.timeline()
    walk(
        timeline,
        clock,
        (Stage.PREFILL, 2.0),
        (Stage.HANDOFF, 0.5),
        (Stage.FIRST_TOKEN, 0.25),
        (Stage.STREAM, 8.0),
        (None, 100.0),
    )
    assert timeline.seconds == {
        Stage.PREFILL: 2.0,
        Stage.HANDOFF: 0.5,
        Stage.FIRST_TOKEN: 0.25,
        Stage.STREAM: 8.0,
    }
    assert timeline.stage is Stage.STREAM


def test_a_stage_that_is_entered_again_goes_on_counting(record: RequestRecord, clock: Clock) -> None:
    timeline = record.timeline()
    walk(timeline, clock, (Stage.PREFILL, 1.0), (Stage.PREFILL, 2.0), (None, 0.0))
    assert timeline.seconds == {Stage.PREFILL: 3.0}


@given(
    st.lists(st.tuples(st.none() | st.sampled_from(Stage), st.integers(0, 1000))),
    st.dictionaries(st.sampled_from(Stage), st.integers(0, 1000)),
)
def test_what_was_spent_is_the_sum_of_all_stretches(steps: Marks, before: dict[Stage, float]) -> None:
    spent = defaultdict(float, before)
    for (stage, entered), (_, left) in pairwise(steps):
        if stage is not None:
            spent[stage] += left - entered
    assert seconds_of(steps, before) == dict(spent)


def test_a_new_attempt_starts_from_nothing(record: RequestRecord, clock: Clock) -> None:
    timeline = record.timeline()
    timeline.begin_attempt()
    timeline.prefiller, timeline.decoder = "p:1", "d:1"
    walk(timeline, clock, (Stage.PREFILL, 5.0), (Stage.HANDOFF, 1.0))
    timeline.begin_attempt()
    assert (timeline.stage, timeline.prefiller, timeline.decoder, timeline.attempts) == (None, "-", "-", 2)
    (first,) = timeline.past
    assert (first.prefiller, first.decoder, [stage for stage, _ in first.marks]) == (
        *("p:1", "d:1"),
        [Stage.PREFILL, Stage.HANDOFF],
    )
    walk(timeline, clock, (Stage.PREFILL, 1.0), (None, 0.0))
    assert timeline.seconds == {Stage.PREFILL: 1.0}


def test_an_attempt_that_goes_on_with_an_answer_goes_on_counting(record: RequestRecord, clock: Clock) -> None:
    timeline = record.timeline()
    timeline.begin_attempt()
    walk(timeline, clock, (Stage.PREFILL, 5.0), (Stage.STREAM, 1.0), (None, 0.0))
    timeline.usage.is_resumed = True
    timeline.begin_attempt()
    assert (timeline.stage, timeline.decoder, timeline.attempts) == (None, "-", 2)
    walk(timeline, clock, (Stage.PREFILL, 1.0), (Stage.STREAM, 2.0), (None, 0.0))
    assert timeline.seconds == {Stage.PREFILL: 6.0, Stage.STREAM: 3.0}


def test_the_wait_for_room_outlives_the_attempts(record: RequestRecord, clock: Clock) -> None:
    timeline = record.timeline()
    walk(timeline, clock, (Stage.QUEUE, 4.0))
    timeline.leave()
    timeline.begin_attempt()
    walk(timeline, clock, (Stage.PREFILL, 1.0), (None, 0.0))
    timeline.begin_attempt()
    assert timeline.seconds == {Stage.QUEUE: 4.0}


def test_an_attempt_that_begins_with_media_is_one_attempt(record: RequestRecord, clock: Clock) -> None:
    timeline = record.timeline()
    for attempts in (1, 2):
        timeline.begin_encoding()
        clock.now += 2.0
        timeline.end_encoding()
        timeline.begin_attempt()
        walk(timeline, clock, (Stage.PREFILL, 1.0), (None, 0.0))
        assert (timeline.attempts, timeline.seconds) == (attempts, {Stage.ENCODE: 2.0, Stage.PREFILL: 1.0})
    assert line(record)["t_encode"] == 2.0


def test_an_attempt_that_ends_between_media_and_backends_is_over(record: RequestRecord) -> None:
    timeline = record.timeline()
    timeline.begin_encoding()
    timeline.end_encoding()
    assert record.stage is Stage.ENCODE
    timeline.begin_encoding()
    assert timeline.attempts == 2


def test_what_engines_tell_of_the_prompt_of_a_resumed_answer_is_not_about_the_clients() -> None:
    timeline = Timeline()
    timeline.usage.add_prompt({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}})
    timeline.usage.is_resumed = True
    timeline.usage.add_prompt({"prompt_tokens": 17, "prompt_tokens_details": {"cached_tokens": 16}})
    timeline.usage.add_completion({"completion_tokens": 9})
    assert (timeline.usage.prompt_tokens, timeline.usage.cached_tokens, timeline.usage.completion_tokens) == (10, 4, 9)


def test_the_access_line_counts_how_often_answers_were_taken_up_again(record: RequestRecord) -> None:
    record.timeline().resumes = 2
    record.timeline().resumes = 1
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
def test_usage_is_taken_for_what_it_is(usage: Any, expected: tuple[int | None, int | None]) -> None:
    timeline = Timeline()
    for take in (timeline.usage.add_prompt, timeline.usage.add_completion):
        take(usage)
    assert (timeline.usage.prompt_tokens, timeline.usage.completion_tokens) == expected


def test_cached_tokens_are_taken_for_what_they_are() -> None:
    for said, taken in ((7, 7), (0, 0), (-7, None), (2**64 - 7, None), (True, None), (7.0, None), (None, None)):
        usage = Timeline().usage
        assert usage.add_prompt({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": said}}) == (10, taken)
        assert usage.cached_tokens == taken


def test_a_usage_without_numbers_forgets_nothing() -> None:
    timeline = Timeline()
    for take in (timeline.usage.add_prompt, timeline.usage.add_completion):
        take({"prompt_tokens": 10, "completion_tokens": 3})
    for take in (timeline.usage.add_prompt, timeline.usage.add_completion):
        take({"completion_tokens": None})
    assert (timeline.usage.prompt_tokens, timeline.usage.completion_tokens) == (10, 3)


def test_only_the_first_token_counts(record: RequestRecord, clock: Clock) -> None:
    clock.now += 1.5
    record.first_token()
    clock.now += 1.0
    record.first_token()
    assert record.first_token_seconds == 1.5


def test_a_request_is_where_its_slowest_unit_is(record: RequestRecord, clock: Clock) -> None:
    assert record.stage is None
    walk(record.timeline(), clock, (Stage.STREAM, 0.0))
    walk(record.timeline(), clock, (Stage.HANDOFF, 0.0))
    record.timeline()
    assert record.stage is Stage.HANDOFF


def test_tokens_are_summed_over_the_units(record: RequestRecord) -> None:
    first, second = record.timeline(), record.timeline()
    for take in (first.usage.add_prompt, first.usage.add_completion):
        take({"prompt_tokens": 10, "completion_tokens": 3})
    for take in (second.usage.add_prompt, second.usage.add_completion):
        take({"prompt_tokens": 20, "completion_tokens": 4})
    second.usage.add_prompt({"prompt_tokens_details": {"cached_tokens": 16}})
    record.close()
    facts = record.facts
    assert (facts.prompt_tokens, facts.cached_tokens, facts.completion_tokens) == (30, 16, 7)


def test_the_access_line_of_a_request_that_was_served(record: RequestRecord, clock: Clock) -> None:
    timeline = record.timeline()
    timeline.begin_attempt()
    timeline.prefiller, timeline.decoder, timeline.kv = "p:1", "d:1", "transferred"
    timeline.prefill_id = timeline.decode_id = "a1"
    walk(timeline, clock, (Stage.PREFILL, 2.0), (Stage.HANDOFF, 0.5), (Stage.FIRST_TOKEN, 0.25))
    record.first_token()
    walk(timeline, clock, (Stage.STREAM, 8.0), (None, 0.0))
    for take in (timeline.usage.add_prompt, timeline.usage.add_completion):
        take({"prompt_tokens": 10, "completion_tokens": 3})
    clock.now += 0.000049
    assert line(record) == {
        "id": "r1",
        "key": "-",
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


def test_the_access_line_of_several_units_has_the_longest_stages_and_all_attempts(
    record: RequestRecord, clock: Clock
) -> None:
    for decoder, seconds in (("d:1", 1.0), ("d:2", 3.0)):
        timeline = record.timeline()
        timeline.begin_attempt()
        timeline.begin_attempt()
        timeline.decoder = decoder
        walk(timeline, clock, (Stage.STREAM, seconds), (None, 0.0))
    told = line(record)
    assert (told["d"], told["units"], told["attempts"], told["t_stream"]) == ("d:1", 2, 4, 3.0)


def test_the_access_line_of_a_request_that_never_got_anywhere(record: RequestRecord) -> None:
    record.error = NoBackendAvailable(Role.DECODE)
    told = line(record)
    assert (told["p"], told["d"], told["units"], told["attempts"], told["ttft"]) == ("-", "-", 0, 0, None)
    assert (told["term"], told["code"]) == ("PR", 503)
    assert told["error"] == "no healthy decode instance is available"


def test_an_error_without_a_message_for_clients_is_not_told(record: RequestRecord) -> None:
    record.error = RuntimeError("my-secret-prompt")
    assert line(record)["error"] is None


@pytest.mark.interpreted
def test_all_that_is_noted_of_an_attempt_moves_out_with_it() -> None:
    assert set(OF_AN_ATTEMPT) == set(AttemptRecord.__annotations__)


@pytest.mark.interpreted
def test_facts_are_written_and_read_in_the_order_of_their_fields() -> None:
    facts: dict[str, Any] = {name: name for name in FACTS}
    assert values_of(AccessFacts(**facts)) == FACTS
