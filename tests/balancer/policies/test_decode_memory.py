"""Tests of the likely lengths of answers, and of the KV that decoders will need."""

from __future__ import annotations

import pytest

from proxy.balancer.pick import PickRequest
from proxy.balancer.policies.decode_memory import DecodeMemory, HeldKv
from proxy.common.backend import Load
from proxy.wire.prefix import NO_PREFIX_KEYS
from tests.balancer.policies.test_least_seconds import Subject

PROMPT = 1000


def asking(prompt_tokens: int = PROMPT, limit: int = 256) -> PickRequest:
    load = Load(256, prompt_tokens + limit)
    return PickRequest(load, load, Subject(prompt_tokens, NO_PREFIX_KEYS, limit))


def lease(memory: DecodeMemory, request: PickRequest | None = None) -> HeldKv:
    held = HeldKv(Load())
    memory.add_answer(held, "d", request or asking())
    return held


def write(memory: DecodeMemory, tokens: int) -> None:
    """Let each running answer become longer by this number of tokens."""
    memory.kv_by_decoder["d"].charged_tokens += tokens


def ended(memory: DecodeMemory, tokens: int, count: int = 10, limit: int = 256) -> None:
    """End answers of this length."""
    for _ in range(count):
        memory.remove_answer(lease(memory, asking(limit=limit)), tokens)


def begun(memory: DecodeMemory, count: int, request: PickRequest | None = None) -> list[HeldKv]:
    held = [lease(memory, request) for _ in range(count)]
    for each in held:
        each.began = each.decoder_kv.charged_tokens
    return held


def test_long_answers_are_charged_with_their_mean_and_not_with_the_estimate() -> None:
    memory = DecodeMemory()
    assert memory.predict_kv_tokens(asking()) == PROMPT + 256
    ended(memory, 15_000)
    assert memory.predict_kv_tokens(asking()) == PROMPT + 15_000
    assert memory.predict_kv_tokens(asking(limit=8000)) == PROMPT + 8000, "another limit"


def test_answers_shorter_than_their_limit_are_charged_with_their_mean() -> None:
    memory = DecodeMemory()
    ended(memory, 100, limit=4096)
    assert memory.predict_kv_tokens(asking(limit=4096)) == PROMPT + 100


def test_running_answers_show_that_answers_are_long_before_one_has_ended() -> None:
    memory = DecodeMemory()
    begun(memory, 20)
    write(memory, 6000)
    memory.measure_fill([])
    assert memory.likely_answer_tokens(asking()) == 6000


def test_a_few_long_running_answers_do_not_make_all_long() -> None:
    memory = DecodeMemory()
    ended(memory, 100, count=1000)
    begun(memory, 10)
    write(memory, 10_000)
    memory.measure_fill([])
    assert memory.likely_answer_tokens(asking()) == pytest.approx(198, abs=2)


def test_answers_of_requests_without_details_teach_nothing() -> None:
    memory = DecodeMemory()
    request = PickRequest.make_for_load(Load(1, 100))
    for _ in range(20):
        (held,) = begun(memory, 1, request)
        write(memory, 500)
        memory.measure_fill(["d"])
        memory.remove_answer(held, 500)
    assert memory.predict_kv_tokens(request) == 100


def test_decoder_needs_all_of_long_prompts_with_short_answers() -> None:
    memory = DecodeMemory()
    begun(memory, 10, asking(100_000))
    write(memory, 100)
    fill = memory.measure_fill(["d"])["d"]
    assert fill.needed_share == pytest.approx(1.0, rel=0.02)
    assert fill.prompts_share == pytest.approx(1.0, rel=0.02)


def test_decoder_needs_more_when_answers_grow_together() -> None:
    together, staggered = DecodeMemory(), DecodeMemory()
    for memory in (together, staggered):
        ended(memory, 10_000)
    begun(together, 10)
    write(together, 8000)
    for _ in range(10):
        begun(staggered, 1)
        write(staggered, 1000)
    assert together.measure_fill(["d"])["d"].needed_share > 1.3 * staggered.measure_fill(["d"])["d"].needed_share


def test_decoder_needs_less_when_answers_end_one_by_one() -> None:
    memory = DecodeMemory()
    ended(memory, 10_000)
    for _ in range(10):
        begun(memory, 1)
        write(memory, 1000)
    staggered = memory.measure_fill(["d"])["d"].needed_share
    assert staggered < 0.6
    assert memory.measure_fill(["d"])["d"].needed_share == staggered


def test_answer_beyond_the_likely_length_counts_as_longer() -> None:
    memory = DecodeMemory()
    ended(memory, 1000, count=100)
    begun(memory, 1)
    write(memory, 8000)
    assert memory.measure_fill(["d"])["d"].needed_share > 3


def test_ended_answers_hold_nothing() -> None:
    memory = DecodeMemory()
    for held in begun(memory, 5):
        memory.remove_answer(held, None)
    assert memory.measure_fill(["d"])["d"].needed_share == 1.0
    memory.forget_decoder("d")
    assert memory.measure_fill(["d"]) == {}
