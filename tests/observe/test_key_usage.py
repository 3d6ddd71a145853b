"""Usage by client key: what is counted, over all workers, and how it is shown."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

from proxy.common.backend import Backend, Role
from proxy.common.errors import Failure, LimitExceeded, NoBackendAvailable, UpstreamError
from proxy.common.terms import Stage
from proxy.observe.key_metrics import OTHER_KEYS, collect_keys
from proxy.observe.key_usage import HOUR_SECONDS, KeyAccounts, KeyUsageListener, usage_of
from proxy.observe.record import RequestRecord
from tests.clock import Clock

HOUR = 400_000
DECODER = Backend(Role.DECODE, "10.0.0.1", 80)


class Host:
    """Two workers with the same accounts, at a time that the test sets."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.now = HOUR * HOUR_SECONDS + 10.0
        self.slots = {"a": 0, "b": 1}
        self.accounts = KeyAccounts(workers=2, slots=4)
        self.listeners = [
            KeyUsageListener(self.accounts, worker, lambda: self.slots, lambda: self.now) for worker in range(2)
        ]

    def record(self, key: str = "a", prompt: int = 10, cached: int = 4, completion: int = 5) -> RequestRecord:
        """Return a request that has waited 4 s, prefilled 1 s, and decoded 3 s."""
        record = RequestRecord("chat", "id", self.clock, self.clock.now)
        record.key = key
        timeline = record.add_timeline()
        for stage, seconds in ((Stage.QUEUE, 4), (Stage.PREFILL, 1), (Stage.HANDOFF, 1), (Stage.STREAM, 2)):
            timeline.enter_stage(stage)
            self.clock.now += seconds
        timeline.end_attempt()
        usage = timeline.usage
        usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens = prompt, cached, completion
        return record

    def end(self, *records: RequestRecord, worker: int = 0) -> None:
        for record in records:
            record.close_record()
        self.listeners[worker].handle_batch((), records)

    def usage(self, name: str, hour: int | None = None) -> Mapping[str, float]:
        slot = self.slots.get(name, self.accounts.slot_count)
        account = (
            self.accounts.total_account(slot, name) if hour is None else self.accounts.account_of_hour(slot, name, hour)
        )
        return usage_of(account)

    def samples(self, max_series: int = 100) -> dict[tuple[str, ...], float]:
        """Return the series by name and label values, without buckets."""
        return {
            (sample.name.removeprefix("pdproxy_key_"), *sample.labels.values()): sample.value
            for family in collect_keys(self.accounts, self.slots, max_series, lambda slot: 7 + slot)
            if family is not None
            for sample in family.samples
        }


@pytest.fixture
def host(clock: Clock) -> Host:
    return Host(clock)


def test_usage_is_the_sum_over_all_workers(host: Host) -> None:
    host.end(host.record(), host.record("b", prompt=1000, cached=0, completion=1))
    host.end(host.record(), host.record(), worker=1)
    assert host.usage("a") == {
        "requests": 3,
        "ok": 3,
        "failed": 0,
        "limited": 0,
        "rejected": 0,
        "left": 0,
        "prompt_tokens": 30,
        "cached_tokens": 12,
        "completion_tokens": 15,
        "prefill_seconds": 3.0,
        "decode_seconds": 9.0,
    }
    assert host.usage("b")["prompt_tokens"] == 1000


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (None, "ok"),
        (UpstreamError(Failure.BROKEN, DECODER, "broke"), "failed"),
        (UpstreamError(Failure.TIMEOUT, DECODER, "slow"), "failed"),
        (LimitExceeded("no", code="key_tokens", retry_after_seconds=1.0), "limited"),
        (NoBackendAvailable(Role.DECODE), "rejected"),
        (ConnectionResetError(), "left"),
    ],
)
def test_request_has_one_result(host: Host, error: BaseException | None, result: str) -> None:
    record = host.record()
    record.error = error
    host.end(record)
    usage = host.usage("a")
    assert {name for name in ("ok", "failed", "limited", "rejected", "left") if usage[name]} == {result}


def test_request_whose_client_sent_no_known_key_counts_apart(host: Host) -> None:
    host.end(host.record("-"))
    assert host.usage("-")["requests"] == 1
    assert not any(host.usage("a").values())


def test_running_request_of_a_removed_key_is_counted(host: Host) -> None:
    host.end(host.record("b"))
    host.slots = {"a": 0}
    host.end(host.record("b"))
    assert usage_of(host.accounts.total_account(1, "b"))["requests"] == 2


def test_key_in_a_used_slot_begins_at_zero(host: Host) -> None:
    host.end(host.record("b"), host.record("b"))
    host.slots = {"a": 0, "c": 1}
    assert not any(host.usage("c").values())
    host.end(host.record("c"))
    assert host.usage("c")["requests"] == 1
    host.end(host.record("b"))  # its slot is another key's: it counts apart, and not for that key
    assert host.usage("c")["requests"] == 1


def test_hours_are_counted_apart(host: Host) -> None:
    host.end(host.record())
    host.now += HOUR_SECONDS
    host.end(host.record(), host.record())
    assert [host.usage("a", hour)["requests"] for hour in (HOUR - 1, HOUR, HOUR + 1)] == [0, 1, 2]
    host.now += HOUR_SECONDS
    host.end(host.record())
    assert [host.usage("a", HOUR + hour)["requests"] for hour in (0, 1, 2)] == [0, 2, 1]
    assert host.usage("a")["requests"] == 4


def test_workers_share_the_accounts_across_a_fork(host: Host) -> None:
    pid = os.fork()
    if pid == 0:
        host.end(host.record(), worker=1)
        os._exit(0)
    os.waitpid(pid, 0)
    assert host.usage("a")["requests"] == 1


def test_metrics_have_series_for_each_key(host: Host) -> None:
    first, second = host.record(), host.record()
    first.first_token_seconds, second.first_token_seconds = 0.3, 40.0
    host.end(first, second)
    samples = host.samples()
    assert samples["requests_total", "a", "ok"] == 2
    assert samples["tokens_total", "a", "completion"] == 10
    assert samples["engine_seconds_total", "a", "decode"] == 6
    assert samples["inflight_requests", "b"] == 8
    bucket = ("time_to_first_token_seconds_bucket", "a")
    buckets = {labels[-1]: count for labels, count in samples.items() if labels[:2] == bucket}
    assert (buckets["0.25"], buckets["0.5"], buckets["30.0"], buckets["+Inf"]) == (0, 1, 1, 2)
    assert samples["time_to_first_token_seconds_sum", "a"] == pytest.approx(40.3)
    assert samples["requests_total", "b", "ok"] == 0


def test_keys_beyond_the_limit_share_one_label(host: Host) -> None:
    host.slots = {"a": 0, "b": 1, "c": 2}
    host.end(host.record("a"), host.record("b"), host.record("c"))
    samples = host.samples(max_series=1)
    assert {labels[1] for labels in samples} == {"a", OTHER_KEYS}
    assert samples["requests_total", OTHER_KEYS, "ok"] == 2
    assert samples["inflight_requests", OTHER_KEYS] == 17
    assert not host.samples(max_series=0)
    assert {labels[1] for labels in host.samples(max_series=3)} == {"a", "b", "c"}
