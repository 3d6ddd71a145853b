"""Continuous batching: what a step takes, who is admitted and preempted, and that runs of steps are what steps are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from proxy.sim.hardware.batch import Batch
from proxy.sim.hardware.cost import Cost
from proxy.sim.hardware.work import Shape, Work

COST = Cost(
    prompt=0.1,
    prompt_token=1e-3,
    attention=1e-6,
    step=0.05,
    step_sequence=0.01,
    step_kv_token=1e-6,
    knee=3,
    past_knee=2,
)
ROOMY = Shape(max_num_seqs=8, max_num_batched_tokens=1000, kv_tokens=100_000, block_tokens=10)


@dataclass
class Machine:
    """A batch whose owner does nothing but wait. `ends[work]`: the seconds of its first and of its last token."""

    shape: Shape = ROOMY
    stepwise: bool = False
    transfer_seconds: float | None = None
    now: float = 0.0
    ends: dict[Work, list[float]] = field(default_factory=dict)
    transfers: list[tuple[float, Work]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batch = Batch(COST, self.shape, on_tokens=self._tokens, on_admitted=self._admitted, stepwise=self.stepwise)

    def _tokens(self, work: Work, tokens: int) -> None:
        self.ends.setdefault(work, [self.now, self.now])[1] = self.now

    def _admitted(self, work: Work) -> None:
        assert self.transfer_seconds is not None
        self.transfers.append((self.now + self.transfer_seconds, work))

    def run(self, arrivals: Sequence[tuple[float, Work]] = (), until: float = 1e6) -> None:
        """Submit each work at its time, and go on until all has ended."""
        left = sorted(arrivals, key=lambda each: each[0])
        while True:
            times = [left[0][0]] if left else []
            times += [self.transfers[0][0]] if self.transfers else []
            times += [self.batch.due] if self.batch.due is not None else []
            if not times or min(times) > until:
                return
            self.now = min(times)
            if self.batch.due is not None and self.batch.due <= self.now:
                self.batch.advance(self.now)
            elif self.transfers and self.transfers[0][0] <= self.now:
                self.batch.arrive(self.transfers.pop(0)[1], self.now)
            else:
                self.batch.submit(left.pop(0)[1], self.now)


def test_prompt_takes_what_its_tokens_and_their_attention_take() -> None:
    machine, work = Machine(), Work(100, 1)
    machine.run([(0.0, work)])
    assert machine.ends[work][0] == pytest.approx(0.1 + 0.1 + 1e-6 * 100 * 50)


def test_chunks_of_a_prompt_take_as_long_as_the_whole() -> None:
    whole, parts = Machine(), Machine(Shape(8, 30, 100_000, 10))
    one, two = Work(100, 1), Work(100, 1)
    whole.run([(0.0, one)])
    parts.run([(0.0, two)])
    assert parts.ends[two] == pytest.approx(whole.ends[one])
    assert parts.batch.busy_seconds == pytest.approx(COST.prefill(100))


def test_cached_tokens_are_attended_to_but_not_computed() -> None:
    machine = Machine()
    names = list(range(20))
    machine.run([(0.0, Work(200, 1, names))])
    work = Work(100, 1, names[:10])
    began = machine.now
    machine.run([(began, work)])
    assert work.cached_tokens == 90, "the last token is always computed"
    assert machine.ends[work][0] - began == pytest.approx(COST.prefill(10, 90))


def test_prompt_whose_kv_has_arrived_is_shared() -> None:
    machine = Machine(transfer_seconds=0.0)
    machine.run([(0.0, Work(100, 2, list(range(10)), awaits_kv=True))])
    assert machine.batch.blocks.hit(range(10)) == 10


def test_prompt_of_which_a_part_arrives_computes_the_rest() -> None:
    machine = Machine(transfer_seconds=0.0)
    work = Work(200, 1, list(range(20)), awaits_kv=True)
    machine.batch.submit(work, 0.0)
    machine.transfers.clear()
    machine.batch.compute(work, 0.0, 145)
    machine.run()
    assert (work.fetched_tokens, work.cached_tokens, machine.batch.blocks.cached) == (145, 145, 20)
    assert machine.ends[work][0] == pytest.approx(COST.prefill(55, 145))


def test_decoding_takes_longer_the_more_decode_and_twice_as_long_past_the_knee() -> None:
    seconds = []
    for sequences in (1, 3, 4):
        machine = Machine(transfer_seconds=0.0)
        works = [Work(100, 101, awaits_kv=True) for _ in range(sequences)]
        machine.run([(0.0, work) for work in works])
        first, last = machine.ends[works[0]]
        seconds.append((last - first) / 100)
    assert seconds == pytest.approx([0.06, 0.08, 0.18], rel=0.03)


def test_those_beyond_the_number_of_sequences_wait() -> None:
    machine = Machine(Shape(1, 1000, 100_000, 10))
    works = [Work(100, 1), Work(100, 1)]
    machine.run([(0.0, work) for work in works])
    assert machine.ends[works[1]][0] == pytest.approx(2 * COST.prefill(100))


def test_kv_that_a_decoder_will_fetch_stays_in_use_until_it_is_given_back() -> None:
    machine = Machine(Shape(8, 1000, 200, 10))
    one, two = Work(150, 1, keeps_kv=True), Work(150, 1)
    machine.run([(0.0, one), (0.0, two)])
    assert (machine.batch.waiting, machine.batch.due, two in machine.ends) == (1, None, False)
    machine.batch.give_back(one, machine.now)
    machine.run()
    assert two in machine.ends
    assert machine.batch.blocks.used == 0


def test_newest_request_is_preempted_and_computed_again() -> None:
    machine = Machine(Shape(8, 1000, 220, 10), transfer_seconds=0.0)
    one, two = Work(100, 60, awaits_kv=True), Work(100, 60, awaits_kv=True)
    machine.run([(0.0, one), (0.0, two)])
    assert (one.preemptions, one.generated, two.generated) == (0, 60, 60)
    assert two.preemptions >= 1
    assert machine.batch.preemptions == two.preemptions
    assert machine.batch.recomputed_tokens >= 100
    assert machine.batch.blocks.used == 0


def test_request_larger_than_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        Machine(Shape(8, 1000, 200, 10)).batch.submit(Work(150, 60), 0.0)


def test_dropped_work_leaves_nothing_behind() -> None:
    machine = Machine(Shape(2, 1000, 100_000, 10), transfer_seconds=5.0)
    works = [Work(100, 500), Work(100, 500), Work(100, 500), Work(100, 5, awaits_kv=True)]
    machine.run([(0.0, work) for work in works], until=2.0)
    for work in works:
        machine.batch.drop(work, machine.now)
    machine.run()
    batch = machine.batch
    assert (batch.running, batch.waiting, batch.blocks.used, batch.due) == (0, 0, 0, None)


works = st.tuples(st.floats(0, 5), st.integers(1, 120), st.integers(1, 40), st.integers(0, 3), st.booleans())


@settings(max_examples=80, deadline=None)
@given(st.lists(works, min_size=1, max_size=12), st.sampled_from([180, 400, 100_000]))
def test_runs_of_steps_are_the_same_course_as_the_steps(
    drawn: list[tuple[float, int, int, int, bool]], kv_tokens: int
) -> None:
    courses = []
    for stepwise in (False, True):
        machine = Machine(Shape(5, 50, kv_tokens, 10), stepwise, transfer_seconds=0.03)
        made = [
            (at, Work(prompt, answer, [(family, block) for block in range(prompt // 10)], awaits_kv=awaits))
            for at, prompt, answer, family, awaits in drawn
        ]
        machine.run(made)
        assert machine.batch.blocks.used == 0
        courses.append([machine.ends[work] for _, work in made])
        assert all(work.generated == work.answer_tokens for _, work in made)
    for one, other in zip(*courses, strict=True):
        assert one == pytest.approx(other, abs=1e-6)
