"""Tests of the interface of policies: requests, candidates, charges and trackers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from proxy.balancer.pick import Candidate, GapCounter, LeaseTracker, PickRequest, Policy
from proxy.common.backend import Backend, Load, Role
from proxy.common.errors import Failure, UpstreamError
from proxy.settings import Cost
from proxy.wire.openai import Api
from proxy.wire.prefix import PrefixKeys
from tests.balancer.conftest import Balancer
from tests.parsing import parse

CHAT = b'{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 7, "prompt_cache_key": "a", "user": "b"}'
NOTHING = Load()


class RecordingPolicy(Policy):
    """Policy that chooses the last candidate, charges the first slot ten times as much, and records all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Sequence[Candidate], Sequence[int], PickRequest]] = []
        self.calls: list[tuple[object, ...]] = []

    def choose_candidate(
        self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest
    ) -> Candidate:
        self.seen.append((candidates, weights, request))
        return candidates[-1]

    def load_of_request(self, backend: Backend, request: PickRequest) -> Load:
        load = request.load_for_role(backend.role)
        return Load(compute_tokens=10 * load.compute_tokens, kv_tokens=load.kv_tokens) if backend.port == 1 else load

    def start_tracker(self, backend: Backend, request: PickRequest) -> LeaseTracker:
        load = self.load_of_request(backend, request)
        self.calls.append(("track", backend.name))
        return RecordingTracker(load, self.calls, backend)


class RecordingTracker(LeaseTracker):
    """Tracker that records all calls."""

    def __init__(self, load: Load, calls: list[tuple[object, ...]], backend: Backend) -> None:
        super().__init__(load)
        self.calls = calls
        self.backend = backend

    def record_usage(self, prompt_tokens: int, cached_tokens: int | None) -> None:
        self.calls.append(("note_usage", self.backend.name, prompt_tokens, cached_tokens))

    def record_first_token(self, gap_counter: GapCounter | None = None) -> None:
        self.calls.append(("note_first_token", self.backend.name))

    def record_end(self, is_served: bool, answer_tokens: int | None) -> None:
        self.calls.append(("note_end", self.backend.name, is_served, answer_tokens))


@pytest.fixture
def policy(balancer: Balancer) -> RecordingPolicy:
    policy = RecordingPolicy()
    balancer.decoders.use_policy(policy)
    balancer.prefillers.use_policy(policy)
    return policy


def failed(backend: Backend) -> UpstreamError:
    return UpstreamError(Failure.RESET, backend, "gone")


# Requests and candidates


def test_policies_of_all_roles_get_the_same_request(balancer: Balancer, policy: RecordingPolicy) -> None:
    call = parse(Api.CHAT, CHAT, Cost(), {"x-ttft-deadline-ms": "1500"})
    request = call.make_pick_request()
    with balancer.decoders.make_lease(request) as decoder, balancer.prefillers.make_lease(request) as prefiller:
        assert balancer.books(decoder.backend) == (1, call.make_pick_request().decode_load)
        assert balancer.books(prefiller.backend) == (1, call.make_pick_request().prefill_load)
    (*_, of_decoder), (*_, of_prefiller) = policy.seen
    assert of_decoder is of_prefiller is request
    assert (request.prompt_tokens, request.output_tokens) == (call.prompt_tokens, 7)
    assert (request.session, request.first_token_seconds) == ("a", 1.5)
    assert len(request.prefix_keys.keys) == 1


def test_passed_through_request_has_no_subject() -> None:
    request = PickRequest.make_for_load(Load(3, 4))
    assert (request.load_for_role(Role.PREFILL), request.load_for_role(Role.DECODE)) == (Load(3, 4), Load(3, 4))
    assert (request.prompt_tokens, request.output_tokens, request.session, request.first_token_seconds) == (
        *(0, 0),
        *(None, None),
    )
    assert request.prefix_keys == PrefixKeys()


@pytest.mark.parametrize(
    ("deadline", "seconds"), [("20", 0.02), ("0", None), ("-5", None), ("soon", None), ("inf", None), ("nan", None)]
)
def test_deadline_is_a_positive_number_of_milliseconds(deadline: str, seconds: float | None) -> None:
    assert parse(Api.CHAT, CHAT, Cost(), {"x-ttft-deadline-ms": deadline}).first_token_seconds == seconds


@pytest.mark.parametrize(
    ("members", "session"),
    [
        (b'"user": "b"', "b"),
        (b'"user": 7', None),
        (b'"prompt_cache_key": ""', None),
        (b'"user": "b", "metadata": {"user_id": "c"}', "c"),
        (b'"session_id": "d", "metadata": {"user_id": "c"}', "d"),
        (b'"session_id": 7, "metadata": ["user_id"], "user": "b"', "b"),
        (b'"session_id": "d", "prompt_cache_key": "e"', "e"),
    ],
)
def test_session_is_the_id_of_the_client(members: bytes, session: str | None) -> None:
    body = b'{"prompt": "Hi", %b}' % members
    assert parse(Api.COMPLETIONS, body, Cost()).session_id == session
    assert parse(Api.COMPLETIONS, body, Cost(), {"x-session-id": "f"}).session_id == "f"


def test_candidates_have_limits_and_running_requests(balancer: Balancer) -> None:
    policy = RecordingPolicy()
    pool = balancer.pool(Role.DECODE, max_running=4)
    pool.use_policy(policy)
    one, two = pool.all_backends()
    with (
        pool.make_lease(PickRequest.make_for_load(Load(5, 6), avoided_backends=[two])),
        pool.make_lease(PickRequest.make_for_load(Load(7, 8), avoided_backends=[one])),
    ):
        pool.pick_backend()
        candidates, weights, _ = policy.seen[-1]
        assert [(each.backend, each.max_running, each.running_requests, each.has_room) for each in candidates] == [
            *[(one, 4, 1, True), (two, 4, 1, True)]
        ]
        assert [each.charged_load for each in candidates] == [Load(50, 6), Load(7, 8)]
        assert weights == [56, 15]


def test_policy_chooses_again_without_full_backends(balancer: Balancer) -> None:
    policy = RecordingPolicy()
    pool = balancer.pool(Role.DECODE, max_running=1)
    pool.use_policy(policy)
    one, two = pool.all_backends()
    with pool.make_lease(PickRequest.make_for_load(NOTHING)) as lease:
        assert lease.backend == two
        assert pool.pick_backend() == one
        assert [len(candidates) for candidates, *_ in policy.seen] == [2, 2, 1]
        with pool.make_lease(PickRequest.make_for_load(NOTHING)):
            assert pool.pick_backend() == two  # all are full


# Charges


def test_policy_sets_the_charge_of_the_chosen_backend(balancer: Balancer, policy: RecordingPolicy) -> None:
    one, two = balancer.decoders.all_backends()
    with balancer.decoders.make_lease(PickRequest.make_for_load(Load(5, 6))) as lease:
        assert (lease.backend, balancer.books(two)) == (two, (1, Load(5, 6)))
        assert lease.move_to_other_backend((), failed(two)) == one
        assert (balancer.books(one), balancer.books(two)) == ((1, Load(50, 6)), (0, NOTHING))
        lease.release_compute()
        assert balancer.books(one) == (1, Load(0, 6))
    assert balancer.all_books() == {(0, NOTHING)}


def test_moved_lease_does_not_charge_freed_compute_again(balancer: Balancer, policy: RecordingPolicy) -> None:
    one, two = balancer.prefillers.all_backends()
    with balancer.prefillers.make_lease(PickRequest.make_for_load(Load(5, 6))) as lease:
        lease.release_kv()
        assert lease.move_to_other_backend((), failed(two)) == one
        assert balancer.books(one) == (1, Load(50, 0))
    assert balancer.all_books() == {(0, NOTHING)}


def test_reservation_is_charged_without_notifying_the_tracker(balancer: Balancer, policy: RecordingPolicy) -> None:
    one, two = balancer.decoders.all_backends()
    with balancer.decoders.make_reservation(PickRequest.make_for_load(Load(5, 6), avoided_backends=[two])):
        assert balancer.books(one) == (1, Load(50, 6))
    assert balancer.all_books() == {(0, NOTHING)}
    assert policy.calls == []


# Trackers


def leave(kind: type[BaseException] | None) -> Callable[[Backend], None]:
    def end(backend: Backend) -> None:
        if kind is UpstreamError:
            raise failed(backend)
        if kind is not None:
            raise kind

    return end


@pytest.mark.parametrize(("error", "served"), [(None, True), (UpstreamError, False), (KeyboardInterrupt, False)])
def test_tracker_gets_the_end_of_each_lease(
    balancer: Balancer, policy: RecordingPolicy, error: type[BaseException] | None, served: bool
) -> None:
    try:
        with balancer.prefillers.make_lease(PickRequest.make_for_load(NOTHING)) as lease:
            assert policy.calls == [("track", "p:2")]
            leave(error)(lease.backend)
    except (UpstreamError, KeyboardInterrupt):
        assert error is not None
    assert policy.calls == [("track", "p:2"), ("note_end", "p:2", served, None)]


def test_tracker_gets_a_prefill_answer_at_once(balancer: Balancer, policy: RecordingPolicy) -> None:
    lease = balancer.prefillers.make_lease(PickRequest.make_for_load(NOTHING))
    lease.__enter__()
    lease.release_compute()
    assert policy.calls[1:] == [("note_end", "p:2", True, None)]
    lease.release_compute()
    lease.__exit__(UpstreamError, failed(lease.backend), None)
    assert policy.calls[2:] == []


def test_tracker_gets_usage_and_answer_tokens(balancer: Balancer, policy: RecordingPolicy) -> None:
    with balancer.decoders.make_lease(PickRequest.make_for_load(NOTHING)) as lease:
        lease.record_usage(None, 7)
        lease.record_usage(12, 7)
        lease.confirm_beginning()
        lease.confirm_beginning()
        lease.answer_tokens = 5
    assert policy.calls[1:] == [("note_usage", "d:2", 12, 7), ("note_first_token", "d:2"), ("note_end", "d:2", True, 5)]


def test_moved_lease_has_two_trackers(balancer: Balancer, policy: RecordingPolicy) -> None:
    with balancer.prefillers.make_lease(PickRequest.make_for_load(NOTHING)) as lease:
        lease.move_to_other_backend((), failed(lease.backend))
    assert policy.calls == [
        ("track", "p:2"),
        ("note_end", "p:2", False, None),
        ("track", "p:1"),
        ("note_end", "p:1", True, None),
    ]


def test_tracker_gets_the_end_after_the_policy_was_replaced(balancer: Balancer, policy: RecordingPolicy) -> None:
    with balancer.prefillers.make_lease(PickRequest.make_for_load(NOTHING)):
        other = RecordingPolicy()
        balancer.prefillers.use_policy(other)
    assert policy.calls == [("track", "p:2"), ("note_end", "p:2", True, None)]
    assert other.calls == []


@pytest.mark.parametrize("method", ["choose_candidate", "load_of_request", "start_tracker"])
def test_failing_policy_leaves_no_charge(
    balancer: Balancer, policy: RecordingPolicy, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(RecordingPolicy, method, fail)
    balancer.decoders.use_policy(policy)
    with pytest.raises(ZeroDivisionError), balancer.decoders.make_lease(PickRequest.make_for_load(Load(1, 1))):
        pytest.fail("it must not begin")
    assert balancer.all_books() == {(0, NOTHING)}
