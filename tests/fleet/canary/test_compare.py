"""Verdicts on canaries by counters, usage, time and answers."""

from __future__ import annotations

import pytest

from proxy.balancer.handoff_verdicts import HandoffVerdict
from proxy.fleet.canary import (
    Agreement,
    CanaryPrompt,
    compare_answers,
    judge_by_counters,
    judge_by_time,
    judge_by_usage,
    prompt_bytes,
)
from proxy.wire.exposition import PromptTokenTotals

BEFORE = PromptTokenTotals(100.0, 1000.0, 10.0)


def after(transferred: float = 0, computed: float = 0, cached: float = 0) -> PromptTokenTotals:
    return PromptTokenTotals(BEFORE[0] + transferred, BEFORE[1] + computed, BEFORE[2] + cached)


@pytest.mark.parametrize(
    ("reading", "verdict"),
    [
        (after(), None),  # the canary is not counted yet
        (after(transferred=2000), HandoffVerdict.TRANSFERRED),
        (after(transferred=1999, computed=1), HandoffVerdict.TRANSFERRED),
        (after(computed=2000), HandoffVerdict.COMPUTED),
        (after(transferred=2000, computed=4000), HandoffVerdict.UNKNOWN),  # other clients use the engine
        (after(computed=100, cached=1900), HandoffVerdict.UNKNOWN),  # the engine ignores the salt
        (PromptTokenTotals(0.0, 5.0, 0.0), HandoffVerdict.UNKNOWN),  # the engine was restarted
        (None, HandoffVerdict.UNKNOWN),
    ],
)
def test_counters_before_and_after_a_canary_give_a_verdict(
    reading: PromptTokenTotals | None, verdict: HandoffVerdict | None
) -> None:
    assert judge_by_counters(BEFORE, reading, 2000, reads_from_store=False) is verdict


def test_cached_tokens_of_a_fresh_prompt_were_fetched() -> None:
    assert judge_by_usage(1999, 2000) is HandoffVerdict.TRANSFERRED
    assert judge_by_usage(0, 2000) is judge_by_usage(None, 2000) is HandoffVerdict.UNKNOWN


@pytest.mark.parametrize(
    ("handoff_seconds", "alone_seconds", "verdict"),
    [
        (0.1, 1.0, HandoffVerdict.TRANSFERRED),
        (0.9, 1.0, HandoffVerdict.COMPUTED),
        (0.09, 0.1, HandoffVerdict.UNKNOWN),  # too fast for a verdict
        (None, 1.0, HandoffVerdict.UNKNOWN),
        (0.9, None, HandoffVerdict.UNKNOWN),
    ],
)
def test_handoff_as_slow_as_a_prefill_is_judged_as_computed(
    handoff_seconds: float | None, alone_seconds: float | None, verdict: HandoffVerdict
) -> None:
    assert judge_by_time(handoff_seconds, alone_seconds) is verdict


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([5, 6, 7, 8], [5, 6, 7, 8], Agreement.SAME),
        ([5, 6, 7, 8], [5, 6, 7, 9], Agreement.DRIFTS_APART),
        ([5, 6, 7, 8], [5, 9, 7, 8], Agreement.DIFFERS),
        ("apple beach", "apple beach", Agreement.SAME),
        ("apple beach", "apple bears", Agreement.DRIFTS_APART),
        ("apple beach", "apart", Agreement.DIFFERS),
    ],
)
def test_answers_with_an_equal_beginning_drift(
    one: list[int] | str, other: list[int] | str, expected: Agreement
) -> None:
    assert compare_answers(one, other) is expected


def test_prompt_fits_even_if_every_byte_is_a_token() -> None:
    size = prompt_bytes(2048, 4, [131_072, 4096])
    assert len(CanaryPrompt.make_prompt("m", size).prompt_text) <= size < 4096
    assert prompt_bytes(2048, 4, []) == 8192


def test_canaries_of_one_prompt_have_different_cache_salts() -> None:
    prompt = CanaryPrompt.make_prompt("m", 1000)
    assert prompt.make_body()["cache_salt"] != prompt.make_body()["cache_salt"]
    assert prompt.prompt_text != CanaryPrompt.make_prompt("m", 1000).prompt_text
