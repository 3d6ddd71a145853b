"""What the access line and the metrics are told about a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from proxy.backend import Role
from proxy.errors import NoBackendAvailable
from proxy.observe.outcome import Outcome
from proxy.observe.record import Record
from proxy.observe.timeline import Journey
from proxy.terms import Stage

if TYPE_CHECKING:
    from tests.clock import Clock


@pytest.fixture
def record(clock: Clock) -> Record:
    return Record("chat", "r1", stream=True, clock=clock)


def walk(journey: Journey, clock: Clock, *steps: tuple[Stage | None, float]) -> None:
    for stage, seconds in steps:
        if stage is None:
            journey.leave()
        else:
            journey.enter(stage)
        clock.now += seconds


def test_a_journey_knows_how_long_each_stage_took(record: Record, clock: Clock) -> None:
    journey = record.journey()
    walk(
        journey,
        clock,
        (Stage.PREFILL, 2.0),
        (Stage.HANDOFF, 0.5),
        (Stage.FIRST_TOKEN, 0.25),
        (Stage.STREAM, 8.0),
        (None, 100.0),
    )
    assert journey.seconds == {
        Stage.PREFILL: 2.0,
        Stage.HANDOFF: 0.5,
        Stage.FIRST_TOKEN: 0.25,
        Stage.STREAM: 8.0,
    }
    assert journey.stage is Stage.STREAM


def test_a_stage_that_is_entered_again_goes_on_counting(record: Record, clock: Clock) -> None:
    journey = record.journey()
    walk(journey, clock, (Stage.PREFILL, 1.0), (Stage.PREFILL, 2.0), (None, 0.0))
    assert journey.seconds == {Stage.PREFILL: 3.0}


def test_a_new_attempt_starts_from_nothing(record: Record, clock: Clock) -> None:
    journey = record.journey()
    journey.begin_attempt()
    journey.prefiller, journey.decoder = "p:1", "d:1"
    walk(journey, clock, (Stage.PREFILL, 5.0), (Stage.HANDOFF, 1.0))
    journey.begin_attempt()
    assert (journey.stage, journey.prefiller, journey.decoder, journey.attempts) == (None, "-", "-", 2)
    walk(journey, clock, (Stage.PREFILL, 1.0), (None, 0.0))
    assert journey.seconds == {Stage.PREFILL: 1.0}


def test_an_attempt_that_goes_on_with_an_answer_goes_on_counting(record: Record, clock: Clock) -> None:
    journey = record.journey()
    journey.begin_attempt()
    walk(journey, clock, (Stage.PREFILL, 5.0), (Stage.STREAM, 1.0), (None, 0.0))
    journey.usage.is_resumed = True
    journey.begin_attempt()
    assert (journey.stage, journey.decoder, journey.attempts) == (None, "-", 2)
    walk(journey, clock, (Stage.PREFILL, 1.0), (Stage.STREAM, 2.0), (None, 0.0))
    assert journey.seconds == {Stage.PREFILL: 6.0, Stage.STREAM: 3.0}


def test_the_wait_for_room_outlives_the_attempts(record: Record, clock: Clock) -> None:
    journey = record.journey()
    walk(journey, clock, (Stage.QUEUE, 4.0))
    journey.leave()
    journey.begin_attempt()
    walk(journey, clock, (Stage.PREFILL, 1.0), (None, 0.0))
    journey.begin_attempt()
    assert journey.seconds == {Stage.QUEUE: 4.0}


def test_an_attempt_that_begins_with_media_is_one_attempt(record: Record, clock: Clock) -> None:
    journey = record.journey()
    for attempts in (1, 2):
        journey.begin_encoding()
        clock.now += 2.0
        journey.end_encoding()
        journey.begin_attempt()
        walk(journey, clock, (Stage.PREFILL, 1.0), (None, 0.0))
        assert (journey.attempts, journey.seconds) == (attempts, {Stage.ENCODE: 2.0, Stage.PREFILL: 1.0})
    assert record.fields(Outcome("--", 200, 6.0))["t_encode"] == 2.0


def test_an_attempt_that_ends_between_media_and_backends_is_over(record: Record) -> None:
    journey = record.journey()
    journey.begin_encoding()
    journey.end_encoding()
    assert record.stage is Stage.ENCODE
    journey.begin_encoding()
    assert journey.attempts == 2


def test_what_engines_tell_of_the_prompt_of_a_resumed_answer_is_not_about_the_clients() -> None:
    journey = Journey()
    journey.usage.saw_prompt({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}})
    journey.usage.is_resumed = True
    journey.usage.saw_prompt({"prompt_tokens": 17, "prompt_tokens_details": {"cached_tokens": 16}})
    journey.usage.saw_completion({"completion_tokens": 9})
    assert (journey.usage.prompt_tokens, journey.usage.cached_tokens, journey.usage.completion_tokens) == (10, 4, 9)


def test_the_access_line_counts_how_often_answers_were_taken_up_again(record: Record) -> None:
    record.journey().resumes = 2
    record.journey().resumes = 1
    assert record.fields(Outcome("--", 200, 1.0))["resumes"] == 3


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 10, "completion_tokens": 3}, (10, 3)),
        ({"prompt_tokens": 10}, (10, None)),
        ({"prompt_tokens": "10", "completion_tokens": None}, (None, None)),
        ({}, (None, None)),
        (None, (None, None)),
        ([1], (None, None)),
    ],
)
def test_usage_is_taken_for_what_it_is(usage: Any, expected: tuple[int | None, int | None]) -> None:
    journey = Journey()
    for take in (journey.usage.saw_prompt, journey.usage.saw_completion):
        take(usage)
    assert (journey.usage.prompt_tokens, journey.usage.completion_tokens) == expected


def test_a_usage_without_numbers_forgets_nothing() -> None:
    journey = Journey()
    for take in (journey.usage.saw_prompt, journey.usage.saw_completion):
        take({"prompt_tokens": 10, "completion_tokens": 3})
    for take in (journey.usage.saw_prompt, journey.usage.saw_completion):
        take({"completion_tokens": None})
    assert (journey.usage.prompt_tokens, journey.usage.completion_tokens) == (10, 3)


def test_only_the_first_token_counts(record: Record, clock: Clock) -> None:
    clock.now += 1.5
    record.first_token()
    clock.now += 1.0
    record.first_token()
    assert record.first_token_seconds == 1.5


def test_a_request_is_where_its_slowest_unit_is(record: Record, clock: Clock) -> None:
    assert record.stage is None
    walk(record.journey(), clock, (Stage.STREAM, 0.0))
    walk(record.journey(), clock, (Stage.HANDOFF, 0.0))
    record.journey()
    assert record.stage is Stage.HANDOFF


def test_tokens_are_summed_over_the_units(record: Record) -> None:
    first, second = record.journey(), record.journey()
    for take in (first.usage.saw_prompt, first.usage.saw_completion):
        take({"prompt_tokens": 10, "completion_tokens": 3})
    for take in (second.usage.saw_prompt, second.usage.saw_completion):
        take({"prompt_tokens": 20, "completion_tokens": 4})
    second.usage.saw_prompt({"prompt_tokens_details": {"cached_tokens": 16}})
    assert record.tokens() == (30, 16, 7)


def test_the_access_line_of_a_request_that_was_served(record: Record, clock: Clock) -> None:
    journey = record.journey()
    journey.begin_attempt()
    journey.prefiller, journey.decoder, journey.kv = "p:1", "d:1", "transferred"
    journey.prefill_id = journey.decode_id = "a1"
    walk(journey, clock, (Stage.PREFILL, 2.0), (Stage.HANDOFF, 0.5), (Stage.FIRST_TOKEN, 0.25))
    record.first_token()
    walk(journey, clock, (Stage.STREAM, 8.0), (None, 0.0))
    for take in (journey.usage.saw_prompt, journey.usage.saw_completion):
        take({"prompt_tokens": 10, "completion_tokens": 3})
    assert record.fields(Outcome("--", 200, 10.750049)) == {
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


def test_the_access_line_of_several_units_has_the_longest_stages_and_all_attempts(record: Record, clock: Clock) -> None:
    for decoder, seconds in (("d:1", 1.0), ("d:2", 3.0)):
        journey = record.journey()
        journey.begin_attempt()
        journey.begin_attempt()
        journey.decoder = decoder
        walk(journey, clock, (Stage.STREAM, seconds), (None, 0.0))
    line = record.fields(Outcome("--", 200, 4.0))
    assert (line["d"], line["units"], line["attempts"], line["t_stream"]) == ("d:1", 2, 4, 3.0)


def test_the_access_line_of_a_request_that_never_got_anywhere(record: Record) -> None:
    record.error = NoBackendAvailable(Role.DECODE)
    line = record.fields(Outcome("PR", 503, 0.001))
    assert (line["p"], line["d"], line["units"], line["attempts"], line["ttft"]) == ("-", "-", 0, 0, None)
    assert line["error"] == "no healthy decode instance is available"


def test_an_error_without_a_message_for_clients_is_not_told(record: Record) -> None:
    record.error = RuntimeError("my-secret-prompt")
    assert record.fields(Outcome("PR", 500, 0.0))["error"] is None
