"""The status of the gateway: each worker reports facts, one worker judges them, and all workers show the verdict."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from dataclasses import dataclass
from heapq import nlargest
from typing import TYPE_CHECKING, Any, Final

from proxy.balancer.handoff_verdicts import HandoffVerdict
from proxy.balancer.policies.prefill_cost import SECONDS_PER_LOAD
from proxy.common.background import MAX_SLICE_SECONDS
from proxy.observe.history import TrafficHistory, WorkerTraffic
from proxy.observe.key_usage import RESULTS
from proxy.observe.verdict import (
    JUDGING_WORKER,
    PACE_WINDOW_SECONDS,
    PACES,
    WINDOW_SECONDS,
    InstanceFacts,
    StatusFacts,
    StatusLevel,
    StatusReason,
    StatusVerdicts,
    WorkerFacts,
    judge_status,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from proxy.balancer.blame import PairQuarantine
    from proxy.balancer.health import Health
    from proxy.balancer.policies.handoff_times import HandoffTimes
    from proxy.balancer.pool import Pool
    from proxy.balancer.roster import RosterMember
    from proxy.common.backend import Role
    from proxy.gateway.lanes import Lanes
    from proxy.observe.metrics import Metrics
    from proxy.process.shared import SharedState
    from proxy.process.worker.basis import LiveConfiguration
    from proxy.upstream import Upstream

logger = logging.getLogger("proxy.status")

_REPORT_SECONDS: Final = 1.0
_JUDGE_SECONDS: Final = 2.0
_LOG_AFTER_SECONDS: Final = 6.0
"""Time for which a state must last before it is logged."""
_MAX_LOGGED_REASONS: Final = 5
_MAX_QUIET: Final = 8
"""Number of silent answers of each instance that a worker reports."""
_LIMITED: Final = RESULTS.index("limited")
_ANSWER_TOKENS: Final = ("completion",)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StatusParts:
    """The parts of one worker from which its facts come."""

    shared: SharedState
    worker_number: int
    """Number of the worker, from 0."""
    live_configuration: LiveConfiguration
    metrics: Metrics
    health: Health
    """Health of the instances, as this worker sees it."""
    pools: Mapping[Role, Pool]
    """Pools of the roles that requests need."""
    pair_quarantine: PairQuarantine
    handoff_times: HandoffTimes
    lanes: Lanes
    upstream: Upstream


class StatusReporter:
    """Reports the facts of one worker, and judges those of all if it is the first worker."""

    def __init__(self, parts: StatusParts, clock: Callable[[], float] = time.monotonic) -> None:
        self._status_parts = parts
        self._clock = clock
        self._next_report_at = self._next_judgement_at = 0.0
        self._was_report_complete = True
        self._judgement = StatusJudgement(parts, clock) if parts.worker_number == JUDGING_WORKER else None
        bounds = parts.metrics.time_to_first_token_seconds.bounds
        self._traffic_history = (
            TrafficHistory(bounds, parts.shared.history_board.published_history())
            if parts.worker_number == JUDGING_WORKER
            else None
        )
        self._judgement_steps: Iterator[None] = iter(())
        """The remaining steps of the judgement that has begun."""

    def report_and_judge(self) -> None:
        """Report and judge, if it is time. Must be called regularly.

        A judgement of many instances continues at the next calls, so that streams do not wait for it.
        """
        now = self._clock()
        if now >= self._next_report_at:
            self._next_report_at = now + _REPORT_SECONDS
            is_whole = self._status_parts.shared.status_board.publish_report(
                self._status_parts.worker_number, self._make_report(now)
            )
            if not is_whole and self._was_report_complete:
                logger.warning("status: report cut: there are too many instances; some problems may not be named")
            self._was_report_complete = is_whole
        if self._traffic_history is not None and self._traffic_history.is_due(now):
            reports = {
                number: WorkerTraffic(**report["traffic"])
                for number, report in self._status_parts.shared.status_board.latest_reports().items()
            }
            wall_seconds = time.time()  # noqa: TID251 - wall-clock time for display
            if (history := self._traffic_history.add_sample(reports, now, wall_seconds)) is not None:
                self._status_parts.shared.history_board.publish_history(history)
        if self._judgement is not None and now >= self._next_judgement_at:
            self._next_judgement_at = now + _JUDGE_SECONDS
            self._judgement_steps = self._judgement.judge_in_steps(now)
        for _ in self._judgement_steps:
            if self._clock() - now >= MAX_SLICE_SECONDS:
                break

    def _make_report(self, now: float) -> dict[str, Any]:
        parts, metrics = self._status_parts, self._status_parts.metrics
        queues = [lane.request_service.admission_queue.summarize_queue() for lane in parts.lanes.all_lanes]
        queued, oldest_seconds, waits_for = max(queues, key=lambda queue: queue[1])
        turns = [lane.request_service.admission_queue.summarize_turns() for lane in parts.lanes.all_lanes]
        return {
            "at": now,
            "queued": sum(count for count, _, _ in queues) if queued else 0,
            "oldest_seconds": oldest_seconds,
            "waits_for": waits_for,
            "turns": sum(count for count, _ in turns),
            "oldest_turn_seconds": max(seconds for _, seconds in turns),
            "lag_seconds": _gauge_value(metrics.loop_lag_seconds),
            "memory_share": _gauge_value(metrics.memory_share),
            "fds_share": _gauge_value(metrics.open_fds_share),
            "overload": int(_gauge_value(metrics.overload_state)),
            "is_reload_refused": not _gauge_value(metrics.config_last_reload_successful),
            "exchanged_at": _gauge_value(metrics.replicas_last_exchange_timestamp_seconds),
            "apart": [
                (prefiller.name, decoder.name, until)
                for prefiller, partners in parts.pair_quarantine.quarantined_partners.items()
                if prefiller.role == "prefill"
                for decoder, until in partners.items()
                if until > now
            ],
            "quiet": {
                backend.key: (has_begun, len(seconds), nlargest(_MAX_QUIET, seconds))
                for backend, (has_begun, seconds) in parts.upstream.quiet_seconds_by_backend().items()
            },
            "counts": [(*series, count) for series, count in self._counters_to_report()],
            "traffic": WorkerTraffic(
                in_flight=sum(value for _, value in metrics.inflight_requests.values()),
                queued=sum(count for count, _, _ in queues),
                tokens=next(
                    (value for labels, value in metrics.tokens_total.values() if labels == _ANSWER_TOKENS), 0.0
                ),
                first_tokens=metrics.time_to_first_token_seconds.counts(),
                streamed=parts.upstream.streamed_parts_by_name,
            )._asdict(),
        }

    def _counters_to_report(self) -> Iterator[tuple[tuple[str, ...], float]]:
        """Yield the counters of this worker that matter, as `(metric, *labels)`."""
        metrics = self._status_parts.metrics
        for name, counter in (
            ("rejected", metrics.rejected_total),
            ("requests", metrics.requests_total),
            ("streams_broken", metrics.streams_broken_total),
            ("resumes", metrics.resumes_total),
            ("instance_requests", metrics.instance_requests_total),
        ):
            for labels, value in counter.values():
                if value:
                    yield (name, *labels), value
        names = {backend.name for pool in self._status_parts.pools.values() for backend in pool.all_backends()}
        self._status_parts.upstream.keep_paces(names)
        for name, (count, seconds) in self._status_parts.upstream.paces_by_name.items():
            yield ("stream_parts", name), count
            yield ("stream_seconds", name), seconds


def _gauge_value(gauge: Any) -> float:
    """Return the value of a gauge without labels in this worker."""
    return next((sample.value for family in gauge.collect() for sample in family.samples), 0.0)


class CounterGrowth:
    """Growth of counters over the last `window_seconds`. Counters of a replaced worker begin again at 0."""

    def __init__(self, window_seconds: float = WINDOW_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._last_values: dict[tuple[str, ...], float] = {}
        self._recent_growth: deque[tuple[float, Mapping[tuple[str, ...], float]]] = deque()
        self._total_growth: Counter[tuple[str, ...]] = Counter()
        """The sum of the steps."""

    def add_values(self, now: float, values: Mapping[tuple[str, ...], float]) -> Mapping[tuple[str, ...], float]:
        """Add the present values, and return the growth. `values`: by source, metric and labels."""
        step: Counter[tuple[str, ...]] = Counter()
        for series, value in values.items():
            before = self._last_values.get(series, 0.0)
            if grown := value - before if value >= before else value:
                step[series[1:]] += grown  # type: ignore[assignment]
        self._last_values = dict(values)
        self._recent_growth.append((now, step))
        self._total_growth.update(step)
        while self._recent_growth and now - self._recent_growth[0][0] > self._window_seconds:
            _, expired = self._recent_growth.popleft()
            self._total_growth.subtract(expired)
            for series in expired:
                if not self._total_growth[series]:
                    del self._total_growth[series]
        return self._total_growth

    @property
    def steps(self) -> list[Mapping[tuple[str, ...], float]]:
        """The growth at each call of `add` in the window, in order."""
        return [step for _, step in self._recent_growth]


class StatusJudgement:
    """Gathers the facts of all workers, publishes the verdict, and logs its changes."""

    def __init__(self, parts: StatusParts, clock: Callable[[], float] = time.monotonic) -> None:
        self._parts = parts
        self._counter_growth = CounterGrowth()
        self._pace_growth = CounterGrowth(PACE_WINDOW_SECONDS)
        self._verdicts = StatusVerdicts()
        self._started_at = clock()
        self._logged_state = StatusLevel.HEALTHY.name.lower()
        self._state, self._state_since = self._logged_state, clock()

    def judge_in_steps(self, now: float) -> Iterator[None]:
        """Judge the present facts, and publish the verdict. With 512 instances no step takes more than 2 ms."""
        reports = self._parts.shared.status_board.latest_reports()
        instances = []
        for instance in self._instance_facts(now, reports):
            instances.append(instance)
            yield
        wall_seconds = time.time()  # noqa: TID251 - wall-clock time for display
        facts = self.gather_facts(instances, reports, now, wall_seconds)
        yield
        reasons = judge_status(facts)
        yield
        self._publish_verdict(reasons, now, wall_seconds)

    def _publish_verdict(self, reasons: list[StatusReason], now: float, wall_seconds: float) -> None:
        verdict = self._verdicts.update_verdict(reasons, now, wall_seconds)
        self._parts.shared.status_board.publish_verdict(verdict, now)
        state = verdict["state"]
        if state != self._state:
            self._state, self._state_since = state, now
        if state == self._logged_state or now - self._state_since < _LOG_AFTER_SECONDS:
            return
        self._logged_state = state
        if state == "healthy":
            logger.info("status: changed to healthy")
            return
        level = logging.INFO if state == "degraded" else logging.WARNING
        texts = [reason["text"] for reason in verdict["reasons"]]
        logger.log(level, "status: changed to %s: %s", state, " ".join(texts[:_MAX_LOGGED_REASONS]))

    def gather_facts(
        self,
        instances: Sequence[InstanceFacts],
        reports: Mapping[int, Mapping[str, Any]],
        now: float,
        wall_seconds: float,
    ) -> StatusFacts:
        """Return the facts of all workers. `reports`: see StatusBoard.latest_reports."""
        shared, settings = self._parts.shared, self._parts.live_configuration.settings
        slots = self._parts.live_configuration.current_snapshot.slots_by_key
        exchanged_at = reports.get(self._parts.worker_number, {}).get("exchanged_at", 0.0)
        since = exchanged_at or wall_seconds - (now - self._started_at)
        values = self._counter_values(reports, slots)
        return StatusFacts(
            roles=[role.value for role in self._parts.pools],
            instances=instances,
            workers=[
                WorkerFacts(
                    number=number,
                    age_seconds=now - report["at"],
                    **{
                        name: report[name]
                        for name in (
                            *("queued", "oldest_seconds", "waits_for", "lag_seconds", "memory_share", "fds_share"),
                            *("overload", "is_reload_refused", "turns", "oldest_turn_seconds"),
                        )
                    },
                )
                for number, report in reports.items()
            ],
            pairs_apart={
                pair: until - now for pair, until in shared.status_board.quarantined_pairs().items() if until > now
            },
            counts=self._counter_growth.add_values(now, values),
            recent_paces=self._pace_growth.add_values(
                now, {row: count for row, count in values.items() if row[1] in PACES}
            ),
            pace_steps=self._pace_growth.steps,
            keys={name: count for name, slot in slots.items() if (count := shared.key_usage.count_own_in_flight(slot))},
            sources={
                origin: state.problem
                for origin, state in shared.source_states.states_by_origin().items()
                if state.problem is not None
            },
            exchange_age_seconds=None if settings.replicas.url is None else wall_seconds - since,
        )

    def _counter_values(
        self, reports: Mapping[int, Mapping[str, Any]], slots: Mapping[str, int]
    ) -> dict[tuple[str, ...], float]:
        """Return the counters of all workers by worker, metric and labels."""
        shared = self._parts.shared
        values = {(str(number), *row[:-1]): row[-1] for number, report in reports.items() for row in report["counts"]}
        for name, slot in slots.items():
            values["", "key_limited", name] = shared.key_accounts.total_account(slot, name)[_LIMITED]
        for reason, count in shared.heartbeats.replacements_by_reason().items():
            values["", "worker_replacements", reason] = count
        return values

    def _instance_facts(self, now: float, reports: Mapping[int, Mapping[str, Any]]) -> Iterator[InstanceFacts]:
        for role, pool in self._parts.pools.items():
            pool.all_backends()  # updates the roster
            for member in self._parts.shared.roster.members_of_role(role):
                if member.may_serve:
                    yield self._facts_of_instance(member, now, reports)

    def _facts_of_instance(
        self, member: RosterMember, now: float, reports: Mapping[int, Mapping[str, Any]]
    ) -> InstanceFacts:
        shared, backend = self._parts.shared, member.backend
        quiet = [report["quiet"][backend.key] for report in reports.values() if backend.key in report["quiet"]]
        begun = [each for each in quiet if each[0]] or quiet
        is_decoder = backend.role == "decode"
        found = shared.incompatibilities
        return InstanceFacts(
            role=backend.role.value,
            name=backend.name,
            states=Counter(shared.health_board.states_by_worker(backend)),
            cause=self._parts.health.health_of(backend).state_reason,
            is_refusing=shared.back_offs.would_refuse(backend, now),
            hints={str(each.kind): each.problem_text for each in found.incompatibilities_of(backend)},
            computes_from=_prefillers_of_computed(found.pair_verdicts(backend)) if is_decoder else (),
            slow_from=self._parts.handoff_times.slow_handoffs_of(backend) if is_decoder else {},
            answers=sum(count for _, count, _ in begun),
            has_begun=any(has_begun for has_begun, _, _ in begun),
            quiet_seconds=sorted((seconds for *_, longest in begun for seconds in longest), reverse=True),
            work_seconds=shared.scoreboard.load_of(backend.slot).compute_tokens * SECONDS_PER_LOAD,
        )


def _prefillers_of_computed(pair_verdicts: Mapping[str, HandoffVerdict]) -> tuple[str, ...]:
    return tuple(name for name, verdict in pair_verdicts.items() if verdict is HandoffVerdict.COMPUTED)
