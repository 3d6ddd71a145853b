"""The verdict on the gateway and its engines: one state, and the reasons for it.

`judge_status` is a plain function of facts. The route `GET /admin/status`, the metrics, the log, the status page and
`pdproxy top` all show its result.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from proxy.balancer.backend_health import HealthState
from proxy.balancer.shared.memory import SharedValue
from proxy.common.errors import Failure
from proxy.common.terms import format_count

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from proxy.common.backend import Backend

JUDGING_WORKER: Final = 0
"""The worker that judges. The supervisor replaces it if it dies."""
WINDOW_SECONDS: Final = 30.0
"""Time over which counts such as rejections are summed."""
PACE_WINDOW_SECONDS: Final = 10.0
"""Time in which the paces of decoders are compared. A longer one would mix those before and after a restart."""
PACES: Final = ("stream_parts", "stream_seconds")
"""Counters of the paces of decoders."""
_MIN_WAIT_SECONDS: Final = 2.0
_MIN_TURN_SECONDS: Final = 30.0
"""The default of admission.session_patience_seconds: shorter waits keep prefixes cached."""
_MIN_SILENCE_SECONDS: Final = 5.0
_MIN_SILENT_ANSWERS: Final = 3
"""A decoder computes the next tokens of all answers at the same time. So it is silent if this number of them is."""
_MIN_FULL_SILENCE_SECONDS: Final = 8.0
"""A decoder is silent after this time if all its answers are, whatever their number."""
_SILENCE_GAPS: Final = 20.0
"""A decoder is silent if no answer has grown for this number of its usual times between tokens."""
_MIN_FIRST_TOKEN_SECONDS: Final = 60.0
"""SGLang's decoders get a request while its prompt is computed, so the first token may take long."""
_MIN_PREFILL_SECONDS: Final = 8.0
_PREFILL_FACTOR: Final = 3.0
"""A prefiller is late after this multiple of the predicted time of its prompts."""
_MIN_FINISHED_PROMPTS: Final = 10
"""Prompts that all prefillers must have finished in WINDOW_SECONDS, so that predictions are correct."""
_MIN_LONE_PREFILL_SECONDS: Final = 30.0
_LONE_PREFILL_FACTOR: Final = 20.0
"""The same if there are fewer finished prompts."""
_MIN_FAILURES: Final = 3
_MIN_FAILED_SHARE: Final = 0.2
_SLOW_FACTOR: Final = 3.0
_MIN_SLOW_GAP_SECONDS: Final = 0.05
_MIN_SLOW_PARTS: Final = 50
_MIN_RECENT_SLOW_PARTS: Final = 30
_MIN_SPARSE_PARTS: Final = 10
_MIN_SPARSE_STEPS: Final = 2
"""A slow decoder sends few tokens, above all after a restart, when it gets few requests. A pause of a fast one could
explain them if they are those of one verdict."""
_MIN_SLOW_HANDOFF_SECONDS: Final = 0.5
_MIN_KEY_SHARE: Final = 0.6
_MIN_KEY_REQUESTS: Final = 10
_MIN_LAG_SECONDS: Final = 0.5
_MIN_MEMORY_SHARE: Final = 0.9
_MIN_FDS_SHARE: Final = 0.8
_MAX_REPORT_AGE_SECONDS: Final = 5.0
_MAX_EXCHANGE_AGE_SECONDS: Final = 15.0
_REFUSES: Final = 2
"""Value of `pdproxy_overload_state` while new requests are refused for lack of memory."""

_CLIENT_MISTAKES: Final = frozenset(
    ("invalid_request", "too_large", "unauthorized", "malformed_http", "slow_header", "slow_body", "content_encoding")
)
_KEY_LIMITS: Final = frozenset(("key_concurrency", "key_rate", "key_tokens"))
_NO_BLAME: Final = frozenset((Failure.RECOMPUTED, Failure.REMOVED, Failure.NOT_RESUMED))
_ENGINE_FAILURES: Final = frozenset(str(failure) for failure in Failure if failure not in _NO_BLAME)


class StatusLevel(IntEnum):
    """The state of a gateway. The values are those of `pdproxy_status_state`."""

    HEALTHY = 0
    DEGRADED = 1
    """Something is wrong, and clients are served as usual."""
    IMPAIRED = 2
    """Clients wait, or their requests fail."""
    DOWN = 3
    """No request can be served."""


class StatusReason(NamedTuple):
    """One reason why a gateway is not healthy."""

    level: StatusLevel
    code: str
    """Stable name of the problem; see CODES."""
    kind: str
    """Kind of the subject: `instance`, `pair`, `key`, `side` (a role), `worker`, `source` or `gateway`."""
    subject: str
    """Name of the subject, such as `127.0.0.1:8200` or `prefill`."""
    text: str
    """A sentence with numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceFacts:
    """Facts about one instance that may receive requests."""

    role: str
    name: str
    states: Mapping[HealthState, int] = field(default_factory=dict)
    """Number of workers by the state that they see."""
    cause: str | None = None
    """Reason for the last change of its state. None: it has not changed."""
    is_refusing: bool = False
    """Whether the instance has answered 429 or 503, and is left alone for a while."""
    hints: Mapping[str, str] = field(default_factory=dict)
    """Its incompatibilities: hints by kind."""
    computes_from: Sequence[str] = ()
    """Prefillers whose KV this decoder computes again."""
    slow_from: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Prefillers from which the handoff to this decoder is slow: its time, and the time of ordinary pairs."""
    answers: int = 0
    """Answers under way. If some have begun, only these count."""
    has_begun: bool = True
    """Whether any of these answers has begun. The first token may take long."""
    quiet_seconds: Sequence[float] = ()
    """Time since the last byte of each answer, the longest first. Shorter ones are missing if there are many answers.
    Prefillers send their first byte when the prompt is finished."""
    work_seconds: float = 0.0
    """Predicted time of the prompts under way at a prefiller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """Facts that one worker reports about itself."""

    number: int
    age_seconds: float = 0.0
    """Age of the report."""
    queued: int = 0
    oldest_seconds: float = 0.0
    """Time that the first queued request has waited."""
    waits_for: str = ""
    """Role without room. Empty: requests wait for a better instance."""
    turns: int = 0
    """Turns of sessions that wait for room in a prefix cache."""
    oldest_turn_seconds: float = 0.0
    lag_seconds: float = 0.0
    memory_share: float = 0.0
    fds_share: float = 0.0
    overload: int = 0
    """See `pdproxy_overload_state`."""
    is_reload_refused: bool = False


Counts = Mapping[tuple[str, ...], float]
"""Growth of counters in WINDOW_SECONDS: `(metric, *labels)`. Metrics have no prefix and no suffix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusFacts:
    """The state of a gateway, over all its workers."""

    roles: Sequence[str]
    """Roles that requests need."""
    instances: Sequence[InstanceFacts] = ()
    workers: Sequence[WorkerFacts] = ()
    pairs_apart: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Remaining seconds of the quarantine of each pair of prefiller and decoder."""
    counts: Counts = field(default_factory=dict)
    recent_paces: Counts = field(default_factory=dict)
    """Growth of the counters in PACES in PACE_WINDOW_SECONDS."""
    pace_steps: Sequence[Counts] = ()
    """The parts of this growth: one for each verdict, in order."""
    keys: Mapping[str, int] = field(default_factory=dict)
    """Requests in flight by client key, queued requests included."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Discovery sources that cannot be read, and the problem."""
    exchange_age_seconds: float | None = None
    """Time since the last exchange with other gateways. None: this gateway has no replicas."""


def judge_status(status_facts: StatusFacts) -> list[StatusReason]:
    """Return the reasons why the gateway is not healthy, the worst first. Empty: it is healthy."""
    of_instances = list(_judge_instances(status_facts))
    failing = {reason.subject for reason in of_instances if reason.code == "instance_failing"}
    found = [
        *_judge_roles(status_facts),
        *of_instances,
        *_judge_paces(status_facts),
        *_judge_pairs(status_facts, failing),
        *_judge_requests(status_facts),
        *_judge_keys(status_facts),
        *_judge_gateway(status_facts),
    ]
    return sorted(found, key=lambda reason: -reason.level)


def level_of(reasons: Sequence[StatusReason]) -> StatusLevel:
    """Return the state of a gateway with these reasons."""
    return max((reason.level for reason in reasons), default=StatusLevel.HEALTHY)


def _sum_growth(counts: Counts, metric: str, *labels: str) -> float:
    """Return the growth of all series of a metric whose first labels are these."""
    wanted = (metric, *labels)
    return sum(count for series, count in counts.items() if series[: len(wanted)] == wanted)


# An unknown instance gets requests, so that a gateway serves from its first second.
_USABLE: Final = (HealthState.UP, HealthState.PROBATION, HealthState.UNKNOWN)


def _is_usable(instance_facts: InstanceFacts) -> bool:
    return any(instance_facts.states.get(state) for state in _USABLE)


def _judge_roles(status_facts: StatusFacts) -> Iterator[StatusReason]:
    for role in status_facts.roles:
        members = [each for each in status_facts.instances if each.role == role]
        if not any(map(_is_usable, members)):
            yield StatusReason(StatusLevel.DOWN, "no_instance", "side", role, _no_instance(role, len(members)))


def _no_instance(role: str, count: int) -> str:
    if count < 2:
        return f"The only {role} instance is not up." if count else f"There is no {role} instance."
    return f"None of the {count} {role} instances is up."


_UNHEALTHY: Final = (
    (HealthState.DOWN, "instance_down", "is down"),
    (HealthState.EJECTED, "instance_ejected", "is ejected"),
    (HealthState.PROBATION, "instance_ejected", "is on probation after an ejection"),
)


def _judge_instances(status_facts: StatusFacts) -> Iterator[StatusReason]:
    results = _results_by_instance(status_facts.counts)
    finished_prompts = sum(own.get("ok", 0.0) for (role, _), own in results.items() if role == "prefill")
    for each in status_facts.instances:
        title = f"{each.role} {each.name}"
        for state, code, words in _UNHEALTHY:
            if count := each.states.get(state):
                total = sum(each.states.values())
                where = "" if count == total else f" in {count} of {total} workers"
                cause = f": {each.cause}" if each.cause else ""
                yield StatusReason(StatusLevel.DEGRADED, code, "instance", each.name, f"{title} {words}{where}{cause}.")
                break
        else:
            yield from _judge_failures(each, results.get((each.role, each.name), {}))
        if each.is_refusing:
            text = f"{title} rejects requests as overloaded (429 or 503)."
            yield StatusReason(StatusLevel.DEGRADED, "instance_refuses", "instance", each.name, text)
        if each.hints:
            hints = "; ".join(f"{kind}: {hint}" for kind, hint in each.hints.items())
            text = f"{title} is incompatible: {hints}"
            yield StatusReason(StatusLevel.DEGRADED, "incompatible", "instance", each.name, text)
        yield from _judge_silence(each, status_facts.counts, finished_prompts)


def _results_by_instance(counts: Counts) -> Mapping[tuple[str, str], Mapping[str, float]]:
    """Return the numbers of requests by result, by the role and name of the instance."""
    results: dict[tuple[str, str], dict[str, float]] = {}
    for series, count in counts.items():
        if series[0] == "instance_requests" and count > 0:
            _, role, name, result = series
            results.setdefault((role, name), {})[result] = count
    return results


def _judge_silence(instance_facts: InstanceFacts, counts: Counts, finished_prompts: float) -> Iterator[StatusReason]:
    if not instance_facts.quiet_seconds:
        return
    longest_seconds = instance_facts.quiet_seconds[0]
    if instance_facts.role == "decode":
        usual_seconds = _SILENCE_GAPS * (_gap_seconds(instance_facts.name, counts) or 0.0)
        some = [
            seconds for seconds in instance_facts.quiet_seconds if seconds >= max(_MIN_SILENCE_SECONDS, usual_seconds)
        ]
        least_seconds = max(
            _MIN_FULL_SILENCE_SECONDS if instance_facts.has_begun else _MIN_FIRST_TOKEN_SECONDS, usual_seconds
        )
        are_all_silent = len(some) == instance_facts.answers and some[-1] >= least_seconds
        if are_all_silent or (instance_facts.has_begun and len(some) >= _MIN_SILENT_ANSWERS):
            text = (
                f"decode {instance_facts.name} has sent nothing for {longest_seconds:.0f} s on {len(some)} of "
                f"{format_count(instance_facts.answers, 'running answer')}."
            )
            yield StatusReason(StatusLevel.DEGRADED, "instance_silent", "instance", instance_facts.name, text)
    elif instance_facts.role == "prefill" and _is_prefill_late(instance_facts, longest_seconds, finished_prompts):
        text = (
            f"prefill {instance_facts.name} has not finished a prompt for {longest_seconds:.0f} s; "
            f"{instance_facts.answers} under way, "
            f"which should take {instance_facts.work_seconds:.1f} s."
        )
        yield StatusReason(StatusLevel.DEGRADED, "instance_silent", "instance", instance_facts.name, text)


def _is_prefill_late(instance_facts: InstanceFacts, seconds: float, finished_prompts: float) -> bool:
    """Return whether a prefiller takes much longer than predicted.

    Predictions are learned from finished prompts. So a moderate delay counts only if some have finished lately.
    """
    if finished_prompts < _MIN_FINISHED_PROMPTS:
        return seconds >= max(_MIN_LONE_PREFILL_SECONDS, _LONE_PREFILL_FACTOR * instance_facts.work_seconds)
    return seconds >= max(_MIN_PREFILL_SECONDS, _PREFILL_FACTOR * instance_facts.work_seconds)


def _gap_seconds(name: str, counts: Counts, min_parts: int = 1) -> float | None:
    """Return the mean time between the tokens of a decoder. None: it has sent fewer than `min_parts` tokens."""
    parts = counts.get(("stream_parts", name), 0.0)
    return counts.get(("stream_seconds", name), 0.0) / parts if parts >= min_parts else None


def _judge_failures(instance_facts: InstanceFacts, results: Mapping[str, float]) -> Iterator[StatusReason]:
    failures = {result: count for result, count in results.items() if result in _ENGINE_FAILURES}
    failed, total = sum(failures.values()), sum(results.values())
    if failed >= _MIN_FAILURES and failed >= _MIN_FAILED_SHARE * total:
        kinds = ", ".join(sorted(failures, key=lambda result: -failures[result]))
        text = (
            f"{instance_facts.role} {instance_facts.name} failed {failed:.0f} of {total:.0f} requests in "
            f"{WINDOW_SECONDS:.0f} s: {kinds}."
        )
        yield StatusReason(StatusLevel.DEGRADED, "instance_failing", "instance", instance_facts.name, text)
    if recomputed := results.get(str(Failure.RECOMPUTED)):
        text = (
            f"{instance_facts.role} {instance_facts.name} is short of KV memory: it preempted "
            f"{format_count(int(recomputed), 'answer')} in "
            f"{WINDOW_SECONDS:.0f} s, which other decoders continue."
        )
        yield StatusReason(StatusLevel.DEGRADED, "kv_memory", "instance", instance_facts.name, text)


def _judge_paces(status_facts: StatusFacts) -> Iterator[StatusReason]:
    """Compare the time between tokens among the decoders. One decoder is slow if most others are much faster."""
    names = [each.name for each in status_facts.instances if each.role == "decode"]
    recent = {name: _gap_seconds(name, status_facts.recent_paces, _MIN_RECENT_SLOW_PARTS) for name in names}
    measured = {name: recent[name] or _gap_seconds(name, status_facts.counts, _MIN_SLOW_PARTS) for name in names}
    gaps = {name: gap for name, gap in measured.items() if gap is not None}
    ordered = sorted(gaps.values())
    for name in names:
        own = gaps.get(name)
        others = len(ordered) - (own is not None)
        if not others:
            continue
        # The lower median of the other decoders.
        middle = (others - 1) // 2
        usual = ordered[middle] if own is None or bisect_left(ordered, own) > middle else ordered[middle + 1]
        gap = own or 0.0
        if recent[name] is None:
            gap = max(gap, _sparse_gap_seconds(name, status_facts))
        if gap >= _MIN_SLOW_GAP_SECONDS and gap >= _SLOW_FACTOR * usual:
            text = f"decode {name} takes {1000 * gap:.0f} ms per token, other decoders take {1000 * usual:.0f} ms."
            yield StatusReason(StatusLevel.DEGRADED, "instance_slow", "instance", name, text)


def _sparse_gap_seconds(name: str, status_facts: StatusFacts) -> float:
    """Return the shortest mean time between the recent tokens of a decoder at one verdict, or 0 if they are too few."""
    if status_facts.recent_paces.get(("stream_parts", name), 0.0) < _MIN_SPARSE_PARTS:
        return 0.0
    gaps = [gap for step in status_facts.pace_steps if (gap := _gap_seconds(name, step)) is not None]
    return min(gaps) if len(gaps) >= _MIN_SPARSE_STEPS else 0.0


def _judge_pairs(status_facts: StatusFacts, failing_instances: Collection[str]) -> Iterator[StatusReason]:
    """Judge the pairs. `failing_instances`: instances that are named because their requests fail."""
    unhealthy = {
        each.name for each in status_facts.instances if any(each.states.get(state) for state, *_ in _UNHEALTHY)
    }
    blamed = unhealthy.union(name for name in failing_instances if _is_apart_from_all(name, status_facts, unhealthy))
    for (prefiller, decoder), seconds in status_facts.pairs_apart.items():
        if prefiller in blamed or decoder in blamed:
            continue  # The pair is not the cause.
        text = (
            f"KV handoffs from prefill {prefiller} to decode {decoder} fail: the pair is kept apart for another "
            f"{seconds:.0f} s."
        )
        yield StatusReason(StatusLevel.DEGRADED, "pair_apart", "pair", f"{prefiller} {decoder}", text)
    for each in status_facts.instances:
        for prefiller in each.computes_from:
            text = f"decode {each.name} computes prompts again whose KV prefill {prefiller} has handed over."
            yield StatusReason(StatusLevel.DEGRADED, "pair_recomputes", "pair", f"{prefiller} {each.name}", text)
        for prefiller, (seconds, ordinary_seconds) in each.slow_from.items():
            is_much_slower = seconds >= _SLOW_FACTOR * ordinary_seconds
            if is_much_slower and seconds - ordinary_seconds >= _MIN_SLOW_HANDOFF_SECONDS:
                text = (
                    f"KV handoffs from prefill {prefiller} to decode {each.name} take {seconds:.2f} s, those of "
                    f"ordinary pairs {ordinary_seconds:.2f} s."
                )
                yield StatusReason(StatusLevel.DEGRADED, "pair_slow", "pair", f"{prefiller} {each.name}", text)


def _is_apart_from_all(name: str, facts: StatusFacts, unhealthy: Collection[str]) -> bool:
    """Return whether an instance is kept apart from all healthy instances of the other role, and from several."""
    apart = {pair[0] if pair[1] == name else pair[1] for pair in facts.pairs_apart if name in pair}
    role = next(each.role for each in facts.instances if each.name == name)
    others = {each.name for each in facts.instances if each.role != role and each.role != "encode"}
    return len(apart) > 1 and apart >= others.difference(unhealthy)


def _judge_requests(status_facts: StatusFacts) -> Iterator[StatusReason]:
    queued = sum(worker.queued for worker in status_facts.workers)
    if queued:
        longest = max(status_facts.workers, key=lambda worker: worker.oldest_seconds if worker.queued else -1.0)
        if longest.oldest_seconds >= _MIN_WAIT_SECONDS:
            role = longest.waits_for
            target = f"room at a {role} instance" if role else "a better prefill instance"
            verb = "wait" if queued > 1 else "waits"
            requests = format_count(queued, "request")
            text = f"{requests} {verb} for {target}, the longest for {longest.oldest_seconds:.1f} s."
            yield StatusReason(StatusLevel.IMPAIRED, "queue", "side", role or "prefill", text)
    turn_seconds = max((worker.oldest_turn_seconds for worker in status_facts.workers), default=0.0)
    if turn_seconds >= _MIN_TURN_SECONDS:
        turns = sum(worker.turns for worker in status_facts.workers)
        verb = "wait" if turns > 1 else "waits"
        text = (
            f"{format_count(turns, 'turn')} of sessions {verb} for room in a prefix cache, the longest for "
            f"{turn_seconds:.0f} s."
        )
        yield StatusReason(StatusLevel.IMPAIRED, "sessions", "side", "prefill", text)
    counts, seconds = status_facts.counts, f"{WINDOW_SECONDS:.0f} s"
    rejections = 0.0
    for series, count in counts.items():
        if series[0] == "rejected" and count > 0 and series[1] not in _CLIENT_MISTAKES | {"draining"}:
            if series[1] in _KEY_LIMITS:
                continue
            rejections += count
            text = f"{format_count(int(count), 'request')} rejected in {seconds}: {series[1]}."
            yield StatusReason(StatusLevel.IMPAIRED, "rejected", "gateway", series[1], text)
    errors = sum(count for series, count in counts.items() if series[0] == "requests" and series[-1].startswith("5"))
    broken = _sum_growth(counts, "streams_broken", "engine")
    if errors > rejections or broken:
        total = _sum_growth(counts, "requests")
        text = f"{errors + broken:.0f} of {total:.0f} requests failed in {seconds}: {errors:.0f} with a 5xx status, "
        yield StatusReason(
            StatusLevel.IMPAIRED, "errors", "gateway", "requests", f"{text}{broken:.0f} broken off by engines."
        )
    causes = {series[1]: 0.0 for series in counts if series[0] == "resumes"}
    for cause in causes:
        if count := _sum_growth(counts, "resumes", cause):
            text = f"{format_count(int(count), 'answer')} continued on another decoder in {seconds}: {cause}."
            yield StatusReason(StatusLevel.DEGRADED, "resumed", "gateway", cause, text)


def _judge_keys(status_facts: StatusFacts) -> Iterator[StatusReason]:
    running = sum(status_facts.keys.values())
    has_queue = any(worker.queued and worker.oldest_seconds >= _MIN_WAIT_SECONDS for worker in status_facts.workers)
    for name, count in status_facts.keys.items():
        if has_queue and len(status_facts.keys) > 1 and count >= max(_MIN_KEY_REQUESTS, _MIN_KEY_SHARE * running):
            text = f"Client key {name} has {count} of {running} requests in flight ({count / running:.0%})."
            yield StatusReason(StatusLevel.DEGRADED, "key_dominates", "key", name, text)
    for series, limited in status_facts.counts.items():
        if series[0] == "key_limited" and limited > 0:
            requests = format_count(int(limited), "request")
            text = f"Client key {series[1]} exceeded its limits with {requests} in {WINDOW_SECONDS:.0f} s."
            yield StatusReason(StatusLevel.DEGRADED, "key_limited", "key", series[1], text)


def _judge_gateway(status_facts: StatusFacts) -> Iterator[StatusReason]:
    memory_share = max((worker.memory_share for worker in status_facts.workers), default=0.0)
    if max((worker.overload for worker in status_facts.workers), default=0) >= _REFUSES:
        text = f"The gateway refuses new requests: {memory_share:.0%} of its memory is in use."
        yield StatusReason(StatusLevel.DOWN, "memory", "gateway", "memory", text)
    elif memory_share >= _MIN_MEMORY_SHARE:
        yield StatusReason(
            StatusLevel.DEGRADED, "memory", "gateway", "memory", f"{memory_share:.0%} of the memory is in use."
        )
    for worker in status_facts.workers:
        name = str(worker.number)
        if worker.age_seconds > _MAX_REPORT_AGE_SECONDS:
            text = f"Worker {name} has not reported for {worker.age_seconds:.0f} s: its event loop is blocked."
            yield StatusReason(StatusLevel.IMPAIRED, "worker_silent", "worker", name, text)
        if worker.lag_seconds >= _MIN_LAG_SECONDS:
            text = f"The event loop of worker {name} was {worker.lag_seconds:.1f} s late: it lacks CPU time."
            yield StatusReason(StatusLevel.DEGRADED, "event_loop", "worker", name, text)
        if worker.fds_share >= _MIN_FDS_SHARE:
            text = f"Worker {name} uses {worker.fds_share:.0%} of its file descriptors."
            yield StatusReason(StatusLevel.DEGRADED, "file_descriptors", "worker", name, text)
    for series, count in status_facts.counts.items():
        if series[0] == "worker_replacements" and count > 0:
            text = f"{format_count(int(count), 'worker')} replaced in {WINDOW_SECONDS:.0f} s: {series[1]}."
            yield StatusReason(StatusLevel.DEGRADED, "worker_replaced", "worker", series[1], text)
    for origin, problem in status_facts.sources.items():
        text = f"The discovery source {origin} cannot be read; its last known instances stay: {problem}"
        yield StatusReason(StatusLevel.DEGRADED, "discovery", "source", origin, text)
    if any(worker.is_reload_refused for worker in status_facts.workers):
        text = "The last reload of the configuration was refused: the previous configuration is in force."
        yield StatusReason(StatusLevel.DEGRADED, "reload", "gateway", "configuration", text)
    age = status_facts.exchange_age_seconds
    if age is not None and age > _MAX_EXCHANGE_AGE_SECONDS:
        text = f"The store of the replicas has not answered for {age:.0f} s: loads of other gateways are not known."
        yield StatusReason(StatusLevel.DEGRADED, "replicas", "gateway", "replicas", text)


# Where an operator looks next.

LOOK_AT: Final[Mapping[str, str]] = {
    "no_instance": "GET /instances: the states of this role, and their reasons",
    "instance_down": "the log of the engine, and whether its host is reachable from the gateway",
    "instance_ejected": "GET /admin/requests/recent?instance=…, and the log of the engine at this time",
    "instance_silent": "the log and the GPU of the engine: it accepts requests and computes nothing",
    "instance_failing": "GET /admin/requests/recent?instance=…: the failures, and the log of the engine",
    "instance_refuses": "the queue of the engine, and admission.max_running_prefill and max_running_decode",
    "instance_slow": "the clocks, the memory and other users of the GPU of this engine",
    "kv_memory": "the KV cache usage that the decoder reports, and admission.max_running_decode",
    "incompatible": "the flags of the engine: pdproxy doctor compares them",
    "pair_apart": "the network between both hosts, and the KV transfer flags of both engines",
    "pair_recomputes": "the KV transfer flags of both engines: pdproxy doctor tests the pair",
    "pair_slow": "the network between both hosts: TCP instead of RDMA, or a slow link",
    "queue": "pdproxy advise: whether another split of the instances helps, or more instances",
    "sessions": "pdproxy_resident_sessions, the KV memory of the prefillers, and admission.session_wait_seconds",
    "rejected": "the option that limits this: the table of error codes names it",
    "errors": "GET /admin/requests/recent?failed=true",
    "resumed": "GET /admin/requests/recent?saved=true, and the instances named by other reasons",
    "key_dominates": "GET /admin/usage?key=…, and max_concurrent and tokens_per_minute of the key",
    "key_limited": "GET /admin/usage?key=…: the limits of the key, or its client",
    "memory": "the memory limit of the container, and the number of requests in flight",
    "event_loop": "the CPU time of the host, and option workers",
    "file_descriptors": "the limit of open files of the process (LimitNOFILE)",
    "worker_silent": "the CPU time of the host, and the log of the supervisor",
    "worker_replaced": "the log of the gateway before the replacement",
    "discovery": "the source itself: its file, its DNS name or the API of Kubernetes",
    "reload": "the log of the gateway, or POST /admin/reload?dry_run=true",
    "replicas": "the store that replicas.url names",
}
"""What to look at next, by code."""
CODES: Final = tuple(LOOK_AT)
"""Codes of reasons. They are metric labels, and an interface."""


# The verdict as JSON, with the times of the reasons.

_HELD_SECONDS: Final = 6.0
"""A reason is shown until it was absent for this time, so that the state does not flap."""
_MAX_REASONS: Final = 200
_MAX_SUBJECT: Final = 300
_MAX_TEXT: Final = 500


class StatusVerdicts:
    """Adds times to reasons: each shows since when it holds."""

    def __init__(self) -> None:
        self._held_reasons: dict[tuple[str, str], tuple[StatusReason, float, float]] = {}
        """Reasons by code and subject, with the wall-clock time of the first verdict and the clock of the last."""

    def update_verdict(self, reasons: Sequence[StatusReason], now: float, wall_seconds: float) -> dict[str, Any]:
        """Return the verdict as JSON, with at most _MAX_REASONS reasons, the worst first.

        Args:
            reasons: The present reasons.
            now: Monotonic seconds.
            wall_seconds: Seconds since the Unix epoch.
        """
        for reason in reasons:
            key = reason.code, reason.subject
            _, since, _ = self._held_reasons.get(key, (reason, wall_seconds, now))
            self._held_reasons[key] = reason, since, now
        self._held_reasons = {key: held for key, held in self._held_reasons.items() if now - held[2] <= _HELD_SECONDS}
        shown = sorted(self._held_reasons.values(), key=lambda held: (-held[0].level, held[1]))
        return {
            "state": level_of([reason for reason, _, _ in shown]).name.lower(),
            "at": round(wall_seconds, 3),
            "reasons": [_reason_to_json(reason, since) for reason, since, _ in shown[:_MAX_REASONS]],
            "omitted": max(0, len(shown) - _MAX_REASONS),
        }


def _reason_to_json(reason: StatusReason, held_since: float) -> dict[str, Any]:
    return {
        "code": reason.code,
        "level": reason.level.name.lower(),
        "text": _shorten_text(reason.text, _MAX_TEXT),
        "subject": {"kind": reason.kind, "name": _shorten_text(reason.subject, _MAX_SUBJECT)},
        "since": round(held_since, 3),
        "look_at": LOOK_AT[reason.code],
    }


def _shorten_text(text: str, max_characters: int) -> str:
    return text if len(text) <= max_characters else text[: max_characters - 1] + "…"


# The reports and the verdict in memory that all workers share. Unused pages of this memory cost nothing.

_MAX_REPORT_BYTES: Final = 1024 * 1024  # 1,024 instances take 300 KiB
_MAX_VERDICT_BYTES: Final = 2 * 1024 * 1024  # _MAX_REASONS of the greatest length, with 6 bytes per character


class StatusBoard:
    """The latest report of each worker, and the verdict. Create it before forking."""

    def __init__(self, workers: int = 1) -> None:
        self._reports_by_worker = [
            SharedValue(f"report of worker {number}", _MAX_REPORT_BYTES) for number in range(workers)
        ]
        self._shared_verdict = SharedValue("verdict", _MAX_VERDICT_BYTES)
        for report in self._reports_by_worker:
            report.write_value(None)
        self._shared_verdict.write_value((None, {"state": "healthy", "at": None, "reasons": [], "omitted": 0}))

    def publish_report(self, worker: int, report: Mapping[str, Any] | None) -> bool:
        """Replace the report of a worker. None removes it. Returns False if the report was cut.

        If the report is too long, the second half of its longest list is left out, as often as necessary.
        """
        shared, is_whole = self._reports_by_worker[worker], True
        with shared.hold_writer_lock():
            while True:
                try:
                    shared.write_value(report)
                except ValueError:
                    report, is_whole = _halve_longest_list(report or {}), False
                else:
                    return is_whole

    def erase_report(self, worker: int) -> None:
        """Remove the report of a worker that has died."""
        self.publish_report(worker, None)

    def latest_reports(self) -> Mapping[int, Mapping[str, Any]]:
        """Return the latest report of each worker, by its number."""
        values = {number: report.current_value for number, report in enumerate(self._reports_by_worker)}
        return {number: report for number, report in values.items() if report is not None}

    def publish_verdict(self, verdict: Mapping[str, Any], now: float) -> None:
        """Replace the verdict. `now`: monotonic seconds."""
        with self._shared_verdict.hold_writer_lock():
            self._shared_verdict.write_value((now, verdict))

    def current_verdict(self, now: float) -> Mapping[str, Any]:
        """Return the verdict, as `GET /admin/status` shows it. `now`: monotonic seconds.

        If the worker that judges is blocked, its last verdict may be wrong, so a reason names that worker.
        """
        judged_at, verdict = self._shared_verdict.current_value
        if judged_at is None or now - judged_at <= _MAX_REPORT_AGE_SECONDS:
            return cast("Mapping[str, Any]", verdict)
        age = f"{now - judged_at:.0f} s"
        text = f"The state is {age} old: worker {JUDGING_WORKER}, which judges it, is blocked or restarts."
        reason = StatusReason(StatusLevel.IMPAIRED, "worker_silent", "worker", str(JUDGING_WORKER), text)
        others = [each for each in verdict["reasons"] if (each["code"], each["subject"]["name"]) != reason[1:4:2]]
        level = max(reason.level, StatusLevel[verdict["state"].upper()])
        since = verdict["at"] + _MAX_REPORT_AGE_SECONDS
        return {**verdict, "state": level.name.lower(), "reasons": [_reason_to_json(reason, since), *others]}

    def quarantined_partners(self, backend: Backend, now: float) -> list[str]:
        """Return the partners from which an instance is kept apart. `now`: monotonic seconds."""
        pairs = [pair for pair, until in self.quarantined_pairs().items() if until > now]
        return sorted(partner for pair in pairs if backend.name in pair for partner in pair if partner != backend.name)

    def quarantined_pairs(self) -> dict[tuple[str, str], float]:
        """Return the end of the quarantine of each pair of prefiller and decoder, in monotonic seconds."""
        ends: dict[tuple[str, str], float] = {}
        for report in self.latest_reports().values():
            for prefiller, decoder, until in report["apart"]:
                ends[prefiller, decoder] = max(until, ends.get((prefiller, decoder), 0.0))
        return ends


def _halve_longest_list(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a report without the second half of its longest list. Raises ValueError if no list is left."""
    sizes = {name: len(part) for name, part in report.items() if isinstance(part, Sized) and not isinstance(part, str)}
    name = max(sizes, key=lambda name: sizes[name], default="")
    if not sizes.get(name):
        raise ValueError("a report without lists is too long")
    part = report[name]
    items = list(part.items() if isinstance(part, Mapping) else part)[: sizes[name] // 2]
    return {**report, name: dict(items) if isinstance(part, Mapping) else items}
