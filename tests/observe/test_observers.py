"""Listeners get the beginning and the end of requests, and only the events that they override."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.common.terms import Stage
from proxy.observe import logs
from proxy.observe.listeners import AccessLog, RequestMetrics
from proxy.observe.metrics import Metrics
from proxy.observe.observers import RequestListener, RequestObservers
from proxy.observe.record import RequestRecord
from proxy.settings import Log
from proxy.wire.openai import Api
from tests.asking import request
from tests.conftest import Deploy


class Ends(RequestListener):
    """Listens only to ends."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.records: list[RequestRecord] = []

    def request_ended(self, record: RequestRecord) -> None:
        self.ended.append(record.outcome.termination_code)
        self.records.append(record)


class Counter(RequestListener):
    """Listens only to beginnings."""

    def __init__(self) -> None:
        self.begun = 0

    def request_began(self, record: RequestRecord, headers: Mapping[str, str]) -> None:
        self.begun += 1


class Mistaken(RequestListener):
    """Raises an error in every method."""

    def request_began(self, record: RequestRecord, headers: Mapping[str, str]) -> None:
        raise RuntimeError("began")

    def request_ended(self, record: RequestRecord) -> None:
        raise RuntimeError("ended")

    def handle_batch(self, began: Sequence[RequestRecord], ended: Sequence[RequestRecord]) -> None:
        raise RuntimeError("settle")


class Later:
    """An event loop's `call_later`, whose calls the test runs."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def __call__(self, seconds: float, call: Callable[[], None], **_: object) -> None:
        self.waiting.append(call)

    def run(self) -> None:
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            call()


def test_listener_gets_only_the_events_that_it_overrides() -> None:
    ends, counter = Ends(), Counter()
    observers = RequestObservers((ends, counter))
    record = observers.begin_record("chat", "r1")
    assert (counter.begun, ends.ended) == (1, [])
    observers.end_record(record)
    assert (counter.begun, ends.ended) == (1, ["--"])


def test_failing_listener_does_not_affect_others(caplog: pytest.LogCaptureFixture) -> None:
    ends, counter = Ends(), Counter()
    observers = RequestObservers((Mistaken(), ends, counter))
    record = observers.begin_record("chat", "r1")
    observers.end_record(record)
    assert (counter.begun, ends.ended) == (1, ["--"])
    # One line for each event: `settle` came with the beginning, and with the end.
    methods = [record.getMessage().rpartition(".")[2] for record in caplog.records]
    assert sorted(methods) == ["handle_batch", "handle_batch", "request_began", "request_ended"]


def test_record_that_cannot_be_closed_does_not_affect_others(caplog: pytest.LogCaptureFixture) -> None:
    ends, later = Ends(), Later()
    observers = RequestObservers((ends,))
    with observers.collect_in_batches(later):
        bad, good = observers.begin_record("chat", "bad"), observers.begin_record("chat", "good")
        timeline = bad.add_timeline()
        timeline.entered_stages, timeline.stage_times = [Stage.PREFILL, None], ["mistaken", 1.0]  # type: ignore[list-item]
        observers.end_record(bad)
        observers.end_record(good)
    assert [record.request_id for record in ends.records] == ["good"]
    assert "bad" in caplog.text


async def test_record_of_a_streamed_answer_has_its_stages(deploy: Deploy) -> None:
    deployment = await deploy(1, 1)
    ends = Ends()
    deployment.worker.request_observers.add_listener(ends)
    answer = await deployment.ask(request(Api.CHAT, "hello", stream=True))
    assert answer.is_done
    (record,) = ends.records
    stages = [stage for stage, _ in record.timelines[0].stage_marks]
    assert stages == [Stage.PREFILL, Stage.HANDOFF, Stage.FIRST_TOKEN, Stage.STREAM, None]


def test_ends_are_reported_in_batches_or_at_a_settle() -> None:
    ends, later = Ends(), Later()
    observers = RequestObservers((ends,))
    with observers.collect_in_batches(later):
        records = [observers.begin_record("chat", str(number)) for number in range(3)]
        observers.end_record(records[0])
        observers.end_record(records[1])
        assert (ends.ended, len(later.waiting)) == ([], 1)  # one call for all of them
        later.run()
        assert ends.ended == ["--"] * 2
        observers.end_record(records[2])
        observers.flush_batch()
        assert ends.ended == ["--"] * 3
        observers.end_record(observers.begin_record("chat", "last"))
    assert ends.ended == ["--"] * 4  # leaving the context reports the rest
    later.run()
    observers.end_record(observers.begin_record("chat", "after"))
    assert ends.ended == ["--"] * 5


def test_full_batch_is_reported_at_once() -> None:
    ends, later = Ends(), Later()
    observers = RequestObservers((ends,))
    with observers.collect_in_batches(later):
        for number in range(128):
            assert len(later.waiting) == bool(number)
            observers.end_record(observers.begin_record("chat", str(number)))
        assert (ends.ended, len(later.waiting)) == ([], 2)
        later.run()
        assert len(ends.ended) == 128


# --- listeners of every worker ----------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """Open a log file with the setup of a worker."""
    root, ours = logging.getLogger(), logging.getLogger("proxy")
    before = root.handlers[:], root.level, ours.level
    path = tmp_path / "log"
    with path.open("w") as stream:
        logs.set_up_logging(Log(format="text"), stream)
        yield path
        for handler in set(root.handlers) - set(before[0]):
            handler.close()
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


def ids(log: Path) -> list[str]:
    return [line.partition(" id=")[2].partition(" ")[0] for line in log.read_text().splitlines()]


def test_access_lines_stay_in_order_with_other_lines(log: Path) -> None:
    observers, later = RequestObservers((AccessLog(),)), Later()
    logs.call_before_lines(observers.flush_batch)
    with observers.collect_in_batches(later):
        for number in range(3):
            observers.end_record(observers.begin_record("chat", f"r{number}"))
        assert ids(log) == []
        logging.getLogger("proxy.somewhere").info("later", extra={"fields": {"id": "other"}})
        assert ids(log) == ["r0", "r1", "r2", "other"]
        observers.end_record(observers.begin_record("chat", "r3"))
        logs.access_line({"id": "passed on", "code": 200})
        assert ids(log)[4:] == ["r3", '"passed']
        later.run()
        assert len(ids(log)) == 6


def test_scrape_includes_all_requests_that_have_ended() -> None:
    metrics, later = Metrics(), Later()
    observers = RequestObservers((RequestMetrics(metrics, ("chat",)),))
    metrics.call_before_scrape(observers.flush_batch)
    with observers.collect_in_batches(later):
        running = observers.begin_record("chat", "r1")
        observers.end_record(observers.begin_record("chat", "r2"))
        assert values(metrics, "pdproxy_requests_total") == {("chat", "200"): 1.0}
        assert values(metrics, "pdproxy_inflight_requests") == {("chat",): 1.0}
        observers.end_record(running)
        assert values(metrics, "pdproxy_inflight_requests") == {}


def values(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """Return the samples of a metric that are not zero, by label values."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in metrics.collect()
        for sample in family.samples
        if sample.name == name and sample.value
    }


@given(st.lists(st.floats(min_value=0.0, max_value=4000.0)))
def test_observe_all_equals_single_observations(times: list[float]) -> None:
    at_once, singly = Metrics(), Metrics()
    at_once.queue_seconds.observe_all(times)
    for time in times:
        singly.queue_seconds.observe(time)
    for name in ("bucket", "count"):
        assert values(at_once, f"pdproxy_queue_seconds_{name}") == values(singly, f"pdproxy_queue_seconds_{name}")
    totals = [sum(values(metrics, "pdproxy_queue_seconds_sum").values()) for metrics in (at_once, singly)]
    assert totals[0] == pytest.approx(totals[1])


def test_noted_times_are_counted_once_over_several_settles() -> None:
    metrics = Metrics()
    for seconds in (0.5, 0.25):
        metrics.inter_token_seconds.observe(seconds)
        metrics.settle_noted_values()
    metrics.inter_token_seconds.observe(1.0)
    for _ in range(2):
        assert values(metrics, "pdproxy_inter_token_seconds_count") == {(): 3.0}
        assert values(metrics, "pdproxy_inter_token_seconds_sum") == {(): 1.75}
