"""Health: effects of probes and requests on the state of a backend.

Most tests are stories: a line of signals about backend `A`, and its state after each. `other` is another backend.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from proxy.balancer.backend_health import HealthState
from proxy.balancer.engines import EngineFacts
from proxy.balancer.health import Health, HealthBoard, ProbeFailure, Transition
from proxy.common.backend import Backend, Role
from proxy.common.errors import Failure, UpstreamError
from proxy.settings import HealthChecks
from tests.clock import Clock
from tests.forking import in_child

A, B, C, D = PEERS = [Backend(Role.DECODE, host, 1) for host in "abcd"]
UNKNOWN, UP, DOWN, EJECTED, PROBATION = HealthState
FAILURES: dict[str, tuple[Failure, int | None]] = {
    "refused": (Failure.CONNECT, None),
    "reset": (Failure.RESET, None),
    "timeout": (Failure.TIMEOUT, None),
    "garbage": (Failure.BAD_ANSWER, None),
    "broken": (Failure.BROKEN, None),
    "no-kv": (Failure.MISSING_KV, None),
    "no-memory": (Failure.RECOMPUTED, None),
    "not-resumed": (Failure.NOT_RESUMED, None),
    "restarted": (Failure.RESTARTED, None),
    "bad": (Failure.STATUS, 400),
    "busy": (Failure.STATUS, 503),
    **{str(status): (Failure.STATUS, status) for status in (401, 404, 429, 500)},
}


def failed(word: str, backend: Backend = A) -> UpstreamError:
    failure, status = FAILURES[word]
    return UpstreamError(failure, backend, f"it was {failure.value}", engine_status=status)


class EvenRandom(random.Random):
    """Random numbers that are always the middle."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


class Story:
    """Backend A among its peers, all of them up."""

    def __init__(self, peers: Sequence[Backend] = PEERS, checks: HealthChecks | None = None) -> None:
        self.clock = Clock()
        self.checks = checks or HealthChecks()
        self.health = Health(lambda: self.checks, self.clock, EvenRandom())
        self.peers = peers
        self.told: list[Transition] = []
        self._trial = 0
        for peer in peers:
            self.health.on_probe(peer, True, "test")

    def tell(self, word: str) -> None:
        """Apply one signal about A, or time: `30s`. `try` begins a trial, and `try:OUTCOME` ends it."""
        health = self.health
        transition: Transition | None = None
        match word.split(":"):
            case ["+" | "-"]:
                transition = health.on_probe(A, word == "+", "test")
            case ["late"]:
                transition = health.on_probe(A, False, "test", failure=ProbeFailure.LATE)
            case ["late", "last"]:
                transition = health.on_probe(A, False, "test", failure=ProbeFailure.LATE, is_last_backend=True)
            case ["late", "serving"]:
                transition = health.on_probe(
                    A, False, "test", failure=ProbeFailure.LATE, is_last_backend=True, is_serving=True
                )
            case ["works"]:
                health.on_output(A)
            case ["stall"]:
                transition = health.on_stall(A, self.peers)
            case ["verdict"]:
                transition = health.on_peer_verdict(A, self.peers)
            case ["other"]:
                transition = health.on_outcome(B, None, self.peers)
            case [*trial, "refuses", count]:
                transition = health.on_outcome(
                    A, failed("busy"), self.peers, trial_number=self._trial if trial else 0, refusal_count=int(count)
                )
            case ["try"]:
                assert health.health_of(A).awaits_trial_request
                self._trial = health.begin_trial(A)
                assert not health.health_of(A).awaits_trial_request
            case ["try", "left"]:
                health.abandon_trial(A, self._trial)
            case [*trial, "tokenized"]:
                transition = health.on_outcome(
                    A, None, self.peers, trial_number=self._trial if trial else 0, proves_generation=False
                )
            case [*trial, outcome] if outcome in (*FAILURES, "ok"):
                error = None if outcome == "ok" else failed(outcome)
                transition = health.on_outcome(A, error, self.peers, trial_number=self._trial if trial else 0)
            case _:
                self.clock.now += float(word.removesuffix("s"))
                self.told += health.make_due_changes()
        if transition is not None:
            self.told.append(transition)

    def states(self, words: str) -> str:
        """Apply each word, and return the states of A."""
        states = []
        for word in words.split():
            self.tell(word)
            states.append(
                {PROBATION: "probation"}.get(
                    self.health.health_of(A).health_state, self.health.health_of(A).health_state.value
                )
            )
        return " ".join(states)

    @property
    def causes(self) -> list[str]:
        return [transition.ejection_cause for transition in self.told if transition.ejection_cause is not None]


@pytest.mark.parametrize(
    ("words", "states"),
    [
        # consecutive failures of any kind that counts
        ("500 500 500 500 500", "up up up up ejected"),
        ("500 reset garbage broken no-kv", "up up up up ejected"),
        ("refused 500 refused 500 timeout", "up up up up ejected"),
        ("500 500 500 500 ok 500 500 500 500", "up up up up up up up up up"),
        ("500 500 500 500 other 500", "up up up up up ejected"),
        # two refused connections in a row
        ("refused refused", "up ejected"),
        ("refused ok refused", "up up up"),
        ("refused reset refused", "up up up"),
        ("refused busy refused", "up up up"),
        ("refused bad refused", "up up up"),
        ("refused tokenized refused", "up up up"),
        ("refused + refused", "up up up"),
        ("refused - refused", "up up ejected"),
        # two timeouts in a row while another backend serves
        ("timeout timeout timeout timeout", "up up up up"),
        ("timeout other timeout", "up up ejected"),
        ("other timeout timeout", "up up up"),
        ("timeout timeout other timeout", "up up up ejected"),
        ("timeout other reset timeout", "up up up up"),
        ("timeout other ok timeout", "up up up up"),
        ("timeout other reset timeout timeout", "up up up up up"),
        # a stall is enough
        ("stall", "ejected"),
    ],
)
def test_failed_requests_eject_a_backend_that_is_up(words: str, states: str) -> None:
    assert Story().states(words) == states


@pytest.mark.parametrize("word", ["bad", "401", "404", "no-memory", "not-resumed"])
def test_client_errors_do_not_count_as_failures_of_a_backend(word: str) -> None:
    story = Story()
    assert story.states(f"500 500 500 500 {word} 500 500 500 500") == " ".join(["up"] * 9)
    assert story.health.health_of(A).consecutive_failures == 4


@pytest.mark.parametrize("word", ["busy", "429"])
def test_back_pressure_neither_counts_as_a_failure_nor_resets_the_count(word: str) -> None:
    story = Story()
    assert story.states(f"500 500 500 500 {word} {word} {word} 500") == "up up up up up up up ejected"
    assert story.health.health_of(A).consecutive_failures == 5


@pytest.mark.parametrize(
    ("words", "states"),
    [
        ("refuses:1 other refuses:2 refuses:3", "up up up ejected"),
        ("refuses:1 refuses:2 refuses:3 other refuses:4", "up up up up ejected"),
        # no other backend has served since it began to refuse
        ("other refuses:1 refuses:2 refuses:3 refuses:4", "up up up up up"),
        # it has served since, or works on others
        ("refuses:1 refuses:2 other ok refuses:3", "up up up up up"),
        ("refuses:1 other refuses:0 refuses:0 refuses:0", "up up up up up"),
        # on probation, the first refusals decide nothing, and another request is a trial
        ("stall 30s try try:refuses:1", "ejected probation probation probation"),
        (
            "refuses:1 other refuses:3 30s try try:refuses:4 59s 1s",
            "up up ejected probation probation ejected ejected probation",
        ),
        ("refuses:1 other refuses:3 30s try try:ok", "up up ejected probation probation up"),
    ],
)
def test_backend_is_ejected_when_it_refuses_while_others_serve(words: str, states: str) -> None:
    assert Story().states(words) == states


@pytest.mark.parametrize(
    ("words", "states"),
    [
        ("late late late", "up up down"),
        # what it has produced since the last passed probe overrules probes that time out, for a while
        ("1s ok late late late late", "up up up up up up"),
        ("1s works late late late late", "up up up up up up"),
        ("1s ok late late late 31s late", "up up up up up up down"),
        ("1s ok late late late 31s late:last", "up up up up up up up"),
        ("1s ok 1s + late late late", "up up up up up up down"),
        # but no other kind of failure
        ("1s ok - - -", "up up up up down"),
        # the last one is not taken down while it serves
        ("late:last late:last late:last", "up up down"),
        ("late:serving late:serving late:serving late:serving late:last", "up up up up down"),
        # an answer shows as well as a probe that it is only slow
        ("late late late ok", "up up down up"),
        ("- - - ok", "up up down down"),
    ],
)
def test_late_probes_do_not_take_down_a_backend_that_works(words: str, states: str) -> None:
    assert Story().states(words) == states


def test_last_backend_is_not_ejected_for_refusals() -> None:
    story = Story([A])
    assert story.states("refuses:1 other refuses:3") == "up up up"


@pytest.mark.parametrize(
    ("words", "states"),
    [
        # a probe does not end an ejection, nor does a request from before it
        ("stall + + + ok 29s + 1s", "ejected ejected ejected ejected ejected ejected ejected probation"),
        ("stall 500 500 500 500 500 30s", "ejected ejected ejected ejected ejected ejected probation"),
        # only the outcome of the trial ends the probation
        ("stall 30s + ok 500 busy", "ejected probation probation probation probation probation"),
        ("stall 30s try try:ok", "ejected probation probation up"),
        ("stall 30s try try:500", "ejected probation probation ejected"),
        ("stall 30s try try:busy try try:ok", "ejected probation probation probation probation up"),
        ("stall 30s try try:left try try:ok", "ejected probation probation probation probation up"),
        ("stall 30s try try:tokenized try try:ok", "ejected probation probation probation probation up"),
        ("stall 30s try stall", "ejected probation probation ejected"),
        ("stall 30s try stall try:ok", "ejected probation probation ejected ejected"),
        # refused connections end with the first that is accepted, whatever shows it
        ("refused refused +", "up ejected up"),
        ("500 500 500 refused refused + 500", "up up up up ejected up up"),
        ("refused refused ok", "up ejected up"),
        ("refused refused busy", "up ejected up"),
        ("refused refused tokenized", "up ejected up"),
        ("refused refused - - +", "up ejected ejected ejected up"),
        ("refused refused 30s +", "up ejected probation up"),
        ("refused refused 30s try try:refused +", "up ejected probation probation ejected up"),
        ("refused refused 30s try try:500 +", "up ejected probation probation ejected ejected"),
        ("stall 30s try try:refused +", "ejected probation probation ejected ejected"),
        # probes go on meanwhile, and down is down
        ("stall - - - +", "ejected ejected ejected down down"),
        ("stall - - - + +", "ejected ejected ejected down down ejected"),
        ("stall - - - 30s + +", "ejected ejected ejected down down down probation"),
        ("stall 30s - - - + +", "ejected probation probation probation down down probation"),
        ("stall 30s try - - - try:500 + +", "ejected probation probation probation probation down down down probation"),
        ("stall 30s try - - - try:ok + +", "ejected probation probation probation probation down down down up"),
        ("refused refused - - - + +", "up ejected ejected ejected down down up"),
        # nothing is ejected that is down already
        ("- - - 500 500 500 500 500 stall + +", "up up down down down down down down down down up"),
    ],
)
def test_end_of_an_ejection_by_time_trial_or_connection(words: str, states: str) -> None:
    assert Story().states(words) == states


@pytest.mark.parametrize(
    ("words", "states"),
    [
        # a probe that passes makes a trial of it, and that decides
        ("verdict + try try:ok", "ejected probation probation up"),
        ("verdict + try try:500", "ejected probation probation ejected"),
        ("verdict + try try:500 + 29s 1s", "ejected probation probation ejected ejected ejected probation"),
        ("verdict + try try:left try try:ok", "ejected probation probation probation probation up"),
        # it expires
        ("verdict 29s 1s try try:ok", "ejected ejected probation probation up"),
        # what was sent before does not matter
        ("verdict ok 500 refused refused", "ejected ejected ejected ejected ejected"),
        # once it has been found down here, it is as any other
        ("verdict - - - + +", "ejected ejected ejected down down probation"),
        ("verdict - + try try:ok", "ejected ejected probation probation up"),
        # nothing new of one that is out already, or on trial
        ("stall verdict + 30s", "ejected ejected ejected probation"),
        ("- - - verdict + +", "up up down down down up"),
        ("verdict + verdict try try:ok verdict", "ejected probation probation probation up ejected"),
    ],
)
def test_verdict_of_another_gateway_is_checked_by_a_probe_and_a_trial(words: str, states: str) -> None:
    assert Story().states(words) == states


def test_wrong_verdict_of_another_gateway_has_no_later_effect() -> None:
    story = Story()
    story.states("verdict + try try:ok")
    assert story.health.request_share_percent(A) == 100
    story.states("stall")
    assert ejection_seconds(story) == 30


def test_verdicts_of_other_gateways_leave_enough_backends() -> None:
    story = Story([A, B, C, D])
    for peer in story.peers:
        story.health.on_peer_verdict(peer, story.peers)
    assert [story.health.health_of(peer).health_state for peer in story.peers] == [EJECTED, EJECTED, UP, UP]


@pytest.mark.parametrize(
    ("words", "causes"),
    [
        ("500 500 500 500 500", ["failures"]),
        ("refused refused", ["connect"]),
        ("500 500 500 refused refused", ["connect"]),
        ("timeout other timeout", ["timeouts"]),
        ("stall", ["stall"]),
        ("stall 30s try try:500", ["stall", "failures"]),
        ("refuses:1 other refuses:3", ["refuses"]),
        ("stall 30s try try:timeout", ["stall", "timeouts"]),
        ("stall 30s try try:refused", ["stall", "connect"]),
        ("- - - + + + 500 +", []),
        ("verdict + try try:500", ["other_gateway", "failures"]),
        ("stall - - - + +", ["stall"]),  # that it is still ejected when it comes up again is no other ejection
    ],
)
def test_only_ejections_have_a_cause(words: str, causes: list[str]) -> None:
    story = Story()
    story.states(words)
    assert story.causes == causes


def test_each_transition_is_returned_once() -> None:
    story = Story()
    story.states("refused refused refused 30s 1s try try:ok ok stall stall")
    assert story.told == [
        Transition(A, UP, EJECTED, "it was connect, 2 failures in a row, for 30 s", "connect"),
        Transition(A, EJECTED, PROBATION, "the next request decides"),
        Transition(A, PROBATION, UP, "served a request"),
        Transition(A, UP, EJECTED, "sends nothing while others do, for 60 s", "stall"),
    ]


def down(story: Story, *backends: Backend) -> None:
    """Let the probes of backends fail until they are down."""
    for backend in backends * 3:
        story.health.on_probe(backend, False, "test")


# Duration of ejections


def ejection_seconds(story: Story) -> float:
    """Wait for the end of an ejection, and return its duration."""
    began = story.clock.now
    while story.health.health_of(A).health_state is EJECTED:
        story.tell("1s")
    return story.clock.now - began


def test_nth_ejection_in_a_row_lasts_n_times_as_long_up_to_the_maximum() -> None:
    story = Story(checks=HealthChecks(eject_seconds=30.0, max_eject_seconds=100.0))
    story.tell("stall")
    lengths = [ejection_seconds(story)]
    for _ in range(5):
        story.states("try try:500")
        lengths.append(ejection_seconds(story))
    assert lengths == [30, 60, 90, 100, 100, 100]


@pytest.mark.parametrize(("healthy_seconds", "next_seconds"), [(0, 120), (29, 120), (30, 90), (75, 60), (1000, 30)])
def test_each_healthy_interval_removes_one_ejection_from_the_count(healthy_seconds: int, next_seconds: int) -> None:
    story = Story()
    story.states("stall 30s try try:500 60s try try:500 90s try try:ok")
    story.states(f"{healthy_seconds}s stall")
    assert ejection_seconds(story) == next_seconds


@pytest.mark.parametrize(
    ("words", "next_seconds"),
    [("10s - - - 600s + + stall", 60), ("35s - - - + + stall", 30), ("- - - + + 35s stall", 30)],
)
def test_time_down_is_not_healthy_but_time_before_and_after_is(words: str, next_seconds: int) -> None:
    story = Story()
    story.states(f"stall 30s try try:ok {words}")
    assert ejection_seconds(story) == next_seconds


@pytest.mark.parametrize("words", ["500s - - - + +", "- - - + + 119s 1s"])
def test_time_ejected_is_not_healthy_even_if_probes_pass(words: str) -> None:
    story = Story()
    story.states("stall 30s try try:500 60s try try:500 90s try try:ok 1s stall")
    assert story.states(f"{words} try try:500").endswith("ejected")
    assert ejection_seconds(story) == 150


def test_ejections_are_counted_only_up_to_the_maximum_duration() -> None:
    story = Story(checks=HealthChecks(eject_seconds=30.0, max_eject_seconds=60.0))
    story.states("stall 30s" + " try try:500 60s" * 10 + " try try:ok 60s stall")
    assert ejection_seconds(story) == 30


def test_ejections_of_several_backends_end_at_different_times() -> None:
    health = Health(rng=random.Random(1), clock=Clock())
    for peer in PEERS:
        health.on_probe(peer, True, "test")
    told = [health.on_stall(backend, PEERS) for backend in (A, B)]
    seconds = [float(t.reason.split()[-2]) for t in told if t is not None]
    assert len(set(seconds)) == 2
    assert all(24 <= each <= 36 for each in seconds)


# Number of ejections


@pytest.mark.parametrize(
    ("backends", "share", "ejected"),
    [
        (1, 1.0, 0),
        (2, 0.5, 1),
        (3, 0.5, 1),
        (4, 0.5, 2),
        (5, 0.5, 2),
        (2, 0.1, 1),
        (4, 1.0, 3),
        (10, 0.3, 3),
        (100, 0.29, 29),
        (4, 0.0, 0),
    ],
)
def test_ejections_stay_within_the_share_and_spare_the_last_backend(backends: int, share: float, ejected: int) -> None:
    peers = [Backend(Role.DECODE, "d", port) for port in range(backends)]
    health = Health(lambda: HealthChecks(max_ejected_share=share), Clock())
    for _ in range(10):
        for peer in peers:
            health.on_outcome(peer, failed("500", peer), peers)
            health.on_stall(peer, peers)
    assert [health.health_of(peer).health_state for peer in peers].count(EJECTED) == ejected


def test_deferred_ejection_happens_at_the_next_failure_once_allowed() -> None:
    story = Story([A, B])
    story.health.on_stall(B, story.peers)
    assert story.states("500 500 500 500 500 500 30s") == " ".join(["up"] * 7)
    trial = story.health.begin_trial(B)
    story.health.on_outcome(B, None, story.peers, trial_number=trial)
    assert story.states("500") == "ejected"


def test_backend_on_probation_counts_as_ejected_in_the_share() -> None:
    story = Story([A, B])
    story.health.on_stall(B, story.peers)
    story.tell("40s")
    assert story.health.health_of(B).health_state is PROBATION
    assert story.states("stall") == "up"


def test_backend_is_the_last_if_its_peers_are_down_or_unproven() -> None:
    story = Story([A, B, C])
    down(story, B)
    story.health.forget_backend(C)
    story.health.on_added(C)
    assert story.states("stall refused refused") == "up up up"
    story.health.on_probe(C, True, "test")
    assert story.states("stall") == "ejected"


def test_draining_backend_is_not_ejected() -> None:
    story = Story()
    story.peers = [B, C, D]
    assert story.states("stall 500 500 500 500 500") == " ".join(["up"] * 6)


def test_failed_trial_of_the_last_backend_is_followed_by_another_trial() -> None:
    story = Story([A, B])
    assert story.states("stall 30s try") == "ejected probation probation"
    down(story, B)
    assert story.states("try:500 try try:ok") == "probation probation up"


def test_probes_may_take_all_backends_down() -> None:
    story = Story()
    down(story, *PEERS)
    assert {story.health.health_of(peer).health_state for peer in PEERS} == {DOWN}


def test_ejected_backends_go_on_probation_when_no_other_is_left() -> None:
    story = Story([A, B, C])
    story.health.on_stall(A, story.peers)
    assert story.health.release_last_ejected(story.peers) == ()
    down(story, B, C)
    assert story.health.release_last_ejected(story.peers) == [
        Transition(A, EJECTED, PROBATION, "no other backend is left")
    ]
    assert story.health.release_last_ejected(story.peers) == ()
    assert not story.health.release_last_ejected([])
    for _ in range(2):
        story.health.on_probe(B, True, "test")
    assert story.health.health_of(B).health_state is UP


# Trials


def test_outcome_of_an_earlier_trial_is_ignored() -> None:
    story = Story()
    story.states("stall 30s")
    late = story.health.begin_trial(A)
    story.states("stall 60s try")
    story.health.on_outcome(A, None, PEERS, trial_number=late)
    story.health.abandon_trial(A, late)
    assert story.health.health_of(A).health_state is PROBATION
    assert not story.health.health_of(A).awaits_trial_request
    assert story.states("try:ok") == "up"


def test_only_backend_on_probation_awaits_a_trial() -> None:
    story = Story()
    awaits = []
    for word in "ok stall 30s try try:busy - - - + + try try:ok".split():
        story.tell(word)
        awaits.append(story.health.health_of(A).awaits_trial_request)
    assert awaits == [False, False, True, False, True, True, True, False, False, True, False, False]


# Slow start


def shares(story: Story, words: str) -> list[int]:
    """Apply each word, and return the shares of A in percent."""
    told = []
    for word in words.split():
        story.tell(word)
        told.append(story.health.request_share_percent(A))
    return told


@pytest.mark.parametrize("words", ["stall 30s try try:ok", "refused refused +", "- - - + +"])
def test_backend_that_came_back_starts_slowly(words: str) -> None:
    story = Story()
    story.states(words)
    assert shares(story, "0s 10s 10s 9.9s 0.1s 1000s") == [10, 40, 70, 99, 100, 100]


def test_no_slow_start_when_the_gateway_starts() -> None:
    assert shares(Story(), "0s 10s + ok") == [100, 100, 100, 100]
    assert Health().request_share_percent(A) == 100


def test_slow_start_restarts_after_another_outage() -> None:
    assert shares(Story(), "- - - + + 20s - - - + +") == [100, 100, 100, 100, 10, 70, 70, 70, 100, 100, 10]


def test_version_increases_when_time_changes_a_state() -> None:
    story = Story()
    versions = []
    for word in "stall 29s 1s try try:ok 29s 1s 1000s".split():
        before = story.health.version_number
        story.tell(word)
        versions.append(story.health.version_number > before)
    #                   stall  29s    1s    try   ok    29s    1s    1000s
    assert versions == [True, False, True, True, True, False, True, False]


def test_each_of_two_timed_changes_happens() -> None:
    story = Story()
    story.health.on_stall(B, PEERS)
    story.states("10s - - - + +")
    story.tell("20s")
    assert story.health.health_of(B).health_state is PROBATION
    before = story.health.version_number
    story.tell("9s")
    assert story.health.version_number == before
    story.tell("1s")
    assert story.health.version_number > before


# Probes alone


@pytest.mark.parametrize(("ok", "new"), [(True, UP), (False, DOWN)])
def test_first_probe_decides_for_an_unknown_backend(ok: bool, new: HealthState) -> None:
    assert Health().on_probe(A, ok, "200") == Transition(A, UNKNOWN, new, "200")


@pytest.mark.parametrize(
    ("words", "states"),
    [
        ("- - + - - + - - -", "up up up up up up up up down"),
        ("- - - + - + +", "up up down down down down up"),
        ("- - - ok ok", "up up down down down"),
        ("- - - + + refused +", "up up down down up up up"),
    ],
)
def test_consecutive_probes_take_a_backend_down_and_up(words: str, states: str) -> None:
    assert Story().states(words) == states


@pytest.mark.parametrize("is_proof", [True, False])
def test_served_request_confirms_an_unknown_backend(is_proof: bool) -> None:
    health = Health()
    assert health.on_outcome(A, None, proves_generation=is_proof) == Transition(A, UNKNOWN, UP, "served a request")
    assert health.health_of(A).is_confirmed_healthy


@pytest.mark.parametrize(("ok", "new", "share"), [(True, UP, 10), (False, DOWN, 100)])
def test_first_probe_decides_for_an_added_backend(ok: bool, new: HealthState, share: int) -> None:
    health = Health(clock=Clock())
    health.on_added(A)
    assert (
        health.health_of(A).health_state,
        health.health_of(A).is_eligible,
        health.health_of(A).may_change_at_next_probe,
    ) == (UNKNOWN, False, True)
    assert health.on_probe(A, ok, "answer") == Transition(A, UNKNOWN, new, "answer")
    assert (health.health_of(A).is_eligible, health.request_share_percent(A)) == (ok, share)


def test_confirmed_backend_that_is_added_again_stays_eligible() -> None:
    story = Story()
    story.health.on_added(A)
    assert story.health.health_of(A).is_eligible


@pytest.mark.parametrize(
    ("words", "changing"),
    [
        ("+ - + - - - + -", "no yes no yes yes no yes no"),
        ("refused + refused refused", "yes no yes yes"),
        ("refused refused 500 +", "yes yes yes no"),
        ("refused 500 stall 30s", "yes no no no"),
    ],
)
def test_backend_is_changing_while_the_next_probe_may_decide(words: str, changing: str) -> None:
    story = Story()
    assert Health().health_of(A).may_change_at_next_probe
    seen = []
    for word in words.split():
        story.tell(word)
        seen.append("yes" if story.health.health_of(A).may_change_at_next_probe else "no")
    assert " ".join(seen) == changing


def test_failures_are_counted_from_zero_after_an_outage() -> None:
    assert Story().states("500 500 500 500 - - - + + 500") == "up up up up up up down down up up"


# Requests without proof


def test_request_without_proof_changes_no_failure_count() -> None:
    story = Story()
    story.states("500 500 500 500 tokenized")
    assert story.health.health_of(A).consecutive_failures == 4
    for word in ("500", "reset", "timeout", "busy"):
        assert story.health.on_outcome(A, failed(word), PEERS, proves_generation=False) is None
    assert story.health.health_of(A).consecutive_failures == 4
    assert story.states("500") == "ejected"


def test_refused_connection_counts_for_a_request_without_proof() -> None:
    story = Story()
    for _ in range(2):
        story.health.on_outcome(A, failed("refused"), PEERS, proves_generation=False)
    assert story.health.health_of(A).health_state is EJECTED


# Separate and unknown backends, versions, settings and facts


def test_backends_have_separate_failure_counts() -> None:
    health = Health()
    for backend in (A, B):
        health.on_outcome(backend, failed("refused", backend), PEERS)
    assert health.health_of(A).is_healthy
    assert health.health_of(B).is_healthy


def test_forgotten_backend_is_unknown_again() -> None:
    story = Story()
    story.states("stall")
    story.health.forget_backend(A)
    story.health.forget_backend(Backend(Role.DECODE, "stranger", 1))
    assert (story.health.health_of(A).health_state, story.health.request_share_percent(A)) == (UNKNOWN, 100)
    assert story.states("1000s") == "unknown"


def test_reading_an_unknown_backend_creates_no_state() -> None:
    health = Health()
    assert (
        health.health_of(A).health_state,
        health.health_of(A).engine_facts,
        health.health_of(A).consecutive_failures,
    ) == (UNKNOWN, None, 0)
    health.forget_backend(A)
    assert health.version_number == 0


def test_version_stays_if_eligibility_cannot_have_changed() -> None:
    story = Story()
    before = story.health.version_number
    story.states("+ ok 500 busy - 10s tokenized")
    assert story.health.version_number == before


def test_changed_health_settings_apply_to_later_events() -> None:
    story = Story()
    story.states("500 500 - + - - - + +")
    story.checks = HealthChecks(fall=1, rise=1, eject_after=2, eject_seconds=7.0, slow_start_seconds=5.0)
    assert shares(story, "4s 1s") == [82, 100]
    assert story.states("- + 500 500 6s 1s") == "down up up ejected ejected probation"


FACTS = EngineFacts((0, 18), 4096, 256)


def test_engine_facts_are_kept_until_the_engine_goes_down() -> None:
    story = Story()
    assert story.health.health_of(A).engine_facts is None
    story.health.set_engine_facts(A, FACTS)
    assert story.health.health_of(A).engine_facts == FACTS
    assert story.health.health_of(B).engine_facts is None
    story.states("- - stall 30s try try:ok")
    assert story.health.health_of(A).engine_facts == FACTS
    story.states("- - - + +")
    assert story.health.health_of(A).engine_facts is None


def test_engine_facts_are_dropped_after_refused_connections() -> None:
    story = Story()
    story.health.set_engine_facts(A, FACTS)
    story.states("refused refused")
    assert story.health.health_of(A).engine_facts is None


@pytest.mark.parametrize("words", ["stall", "stall - - - + +", "stall 30s"])
def test_engine_facts_are_kept_for_an_ejected_engine_whose_probes_pass(words: str) -> None:
    story = Story()
    story.states(words)
    story.health.set_engine_facts(A, FACTS)
    assert not story.health.health_of(A).is_confirmed_healthy
    assert story.health.health_of(A).engine_facts == FACTS


@pytest.mark.parametrize("words", ["- - -", "refused refused"])
def test_engine_facts_are_ignored_while_the_engine_is_down(words: str) -> None:
    """The answer may come after the engine went down or left."""
    story = Story()
    story.states(words)
    story.health.set_engine_facts(A, FACTS)
    story.health.forget_backend(B)
    story.health.set_engine_facts(B, FACTS)
    assert (story.health.health_of(A).engine_facts, story.health.health_of(B).engine_facts) == (None, None)


# States of all workers


BACKEND = Backend(Role.DECODE, "10.0.0.3", 7100, slot=5)


def test_health_board_shows_the_state_in_each_worker() -> None:
    board = HealthBoard(worker_count=3, slot_count=8)
    board.set_state(0, BACKEND, UP)
    in_child(lambda: board.set_state(2, BACKEND, EJECTED))
    assert board.states_by_worker(BACKEND) == [UP, UNKNOWN, EJECTED]
    board.set_state(0, BACKEND, PROBATION)
    assert board.states_by_worker(BACKEND) == [PROBATION, UNKNOWN, EJECTED]


def test_health_board_erases_only_the_row_of_a_dead_worker() -> None:
    board = HealthBoard(worker_count=3, slot_count=8)
    for worker in range(3):
        board.set_state(worker, BACKEND, DOWN)
    board.erase_worker(1)
    assert board.states_by_worker(BACKEND) == [DOWN, UNKNOWN, DOWN]


def test_health_board_reports_unknown_for_the_next_backend_in_a_slot() -> None:
    board = HealthBoard(slot_count=8)
    board.set_state(0, BACKEND, EJECTED)
    assert board.states_by_worker(Backend(Role.DECODE, "10.0.0.4", 7100, slot=5)) == [UNKNOWN]
    assert board.states_by_worker(Backend(Role.PREFILL, "10.0.0.3", 7100, slot=5)) == [UNKNOWN]


def test_health_board_separates_the_slots_of_backends() -> None:
    board = HealthBoard(worker_count=2, slot_count=8)
    board.set_state(0, Backend(Role.DECODE, "10.0.0.3", 7100, slot=7), DOWN)
    board.set_state(1, Backend(Role.DECODE, "10.0.0.3", 7100, slot=0), UP)
    assert board.states_by_worker(BACKEND) == [UNKNOWN, UNKNOWN]
