"""Every metric of the gateway: name, help, labels and buckets, in one table.

Label values come from the configuration or from the tuples below, never from a request, so the number of series is
bounded. What is known about instances is read when somebody scrapes, and an instance that was removed loses its series.
With several workers prometheus-client keeps the values in files under `PROMETHEUS_MULTIPROC_DIR`, which must be set
before this module is imported, and every worker answers for all of them. See `worker_files.py`.
"""

from __future__ import annotations

import os
import platform
from bisect import bisect_left, bisect_right
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args

import aiohttp
import prometheus_client
from prometheus_client import (
    CollectorRegistry,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily

from proxy import __version__
from proxy.balancer.choice import REASONS
from proxy.balancer.fitness.handovers import Verdict
from proxy.balancer.health.breaker import Cause
from proxy.build_info import IS_COMPILED
from proxy.errors import Failure
from proxy.observe.instances import Instances, collect_models
from proxy.observe.sources import collect_sources
from proxy.observe.worker_files import DIRECTORY, WorkerFiles, make_directory
from proxy.terms import KV_EVENT_GAPS, KV_EVENTS, Action, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from prometheus_client import Metric

    from proxy.backend import Backend
    from proxy.balancer.fitness.misfits import Misfits
    from proxy.balancer.health.health import Health
    from proxy.balancer.models import Models
    from proxy.balancer.pool import Pool
    from proxy.balancer.roster import Roster
    from proxy.balancer.shared.scoreboard import Scoreboard
    from proxy.balancer.shared.source_states import SourceStates

_Item = TypeVar("_Item")

# A `_created` series beside every counter and histogram would double the exposition, and nothing reads them.
disable_created_metrics()  # type: ignore[no-untyped-call]

APIS: Final = ("models", "tokenizer", "pooling", "sglang")
"""The routes that do not generate; those that do are labelled by their dialects."""
STAGES: Final = tuple(stage.label for stage in Stage)
LEGS: Final = ("prefill", "decode", "encode")
CHOOSING_ROLES: Final = ("prefill", "decode")
"""Whose choices are counted by reason."""
FAILURES: Final = tuple(str(failure) for failure in Failure)
MISSING_KV_ACTIONS: Final = ("retry_prefill", "local", "error")
CANARIES: Final = (*(str(verdict) for verdict in Verdict), "differs", "failed", "busy")
HANDOVERS: Final = tuple(str(verdict) for verdict in Verdict)
RELEASES: Final = ("released", "failed", "unsupported")
RESUME_ACTIONS: Final = tuple(str(action) for action in Action)
TOKEN_KINDS: Final = ("prompt", "cached", "completion")
BACKGROUND_LOOPS: Final = (
    "canaries",
    "engine_comparison",
    "health_checks",
    "kv_events",
    "replica_exchange",
    "replica_listening",
    "replica_publishing",
)
REJECTIONS: Final = (
    *("invalid_request", "too_large", "no_healthy_prefill", "no_healthy_decode", "no_healthy_encode", "draining"),
    *("queue_full", "queue_timeout", "queue_predicted", "queue_deadline", "all_refuse"),
    *("buffers_full", "memory", "connections"),
    *("unauthorized", "key_concurrency", "key_rate"),
    "suspect_request",
    *("malformed_http", "slow_header", "slow_body", "content_encoding"),
)
EJECTIONS: Final[tuple[str, ...]] = get_args(Cause)
BROKEN_STREAMS: Final = (
    *(("engine", reason) for reason in ("broken", "timeout", "bad_answer", "recomputed")),
    *(("client", reason) for reason in ("left", "write_timeout")),
    *(("gateway", reason) for reason in ("draining", "refused")),
)
TERMS: Final = (
    *("--", "CR", "PR", "CQ", "PQ"),
    *(who + phase for who in "CSsP" for phase in "EFHTD"),
    *("cD", "KD"),
)
"""How a request ended, after HAProxy's termination states. Who: Client, Server (the engine), Proxy, K admin; lower case
for a timeout of that side. When: Reading the request, Queue, Encoding media, preFill, Handoff, waiting for the first
Token, streaming Data."""

# Where vLLM or the llm-d router has the same metric the bounds are theirs, so that panels can be laid over each other.
_REQUEST_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 40, 60, 120, 300, 600, 1800, 3600)
_FIRST_TOKEN_BUCKETS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
)
_INTER_TOKEN_BUCKETS: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2)
_RATIO_BUCKETS: Final = (0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2, 4, 8)
_STAGE_BUCKETS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


def tally(items: Iterable[_Item]) -> list[tuple[_Item, int]]:
    """How often each comes. For some hundred of few kinds this takes less than a Counter, which takes long to make."""
    found = list(items)
    return [(item, found.count(item)) for item in set(found)]


class Counter(prometheus_client.Counter):
    """Without the question with every step whether it has labels, and so no value of its own: that takes longer than
    the step.
    """

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        if amount < 0:
            raise ValueError("a counter only goes up")
        self._value.inc(amount)


class Gauge(prometheus_client.Gauge):
    """See Counter."""

    def inc(self, amount: float = 1) -> None:
        self._value.inc(amount)

    def dec(self, amount: float = 1) -> None:
        self._value.inc(-amount)


class Histogram(prometheus_client.Histogram):
    """See Counter."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        self._sum.inc(amount)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(1)

    def observe_all(self, amounts: Sequence[float]) -> None:
        """The same for many at once, for the price of a few: the bucket of each is not looked for, but how many come
        into the same as the next one.
        """
        self._sum.inc(sum(amounts))
        ordered, bounds = sorted(amounts), self._upper_bounds
        counted = 0
        while counted < len(ordered):
            place = bisect_left(bounds, ordered[counted])
            upto = bisect_right(ordered, bounds[place], counted + 1)
            self._buckets[place].inc(upto - counted)
            counted = upto


class GatheringHistogram(Histogram):
    """For what is observed many times a request: it is noted, and counted when somebody settles. Without labels."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._noted: list[float] = []

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        self._noted.append(amount)

    def settle(self) -> None:
        """Count what was noted."""
        noted, self._noted = self._noted, []
        if noted:
            self.observe_all(noted)


class Metrics:
    """One worker's metrics. The attributes made in `__init__` are the table; `render` is what a scrape gets.

    Each Metrics has a registry of its own unless one is given.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._instances: Instances | None = None
        self._worker_replacements: Callable[[], Mapping[str, int]] | None = None
        self._sources: Callable[[], Iterable[Metric]] | None = None
        self._models: Callable[[], Iterable[Metric]] | None = None
        self._settles: list[Callable[[], None]] = []
        self._registry = registry or CollectorRegistry()
        self._files: WorkerFiles | None = None
        is_shared = DIRECTORY in os.environ
        if is_shared:
            make_directory(Path(os.environ[DIRECTORY]))
        else:
            ProcessCollector(registry=self._registry)
        new: dict[str, Any] = {"namespace": "pdproxy", "registry": self._registry}

        self.build_info = Gauge(
            "build_info",
            "Versions of the gateway, of Python and of aiohttp, and whether it is compiled. Always 1.",
            ("version", "compiled", "python", "aiohttp"),
            multiprocess_mode="livemax",
            **new,
        )
        self.requests_total = Counter(
            "requests_total", "Client requests by API and HTTP status.", ("api", "code"), **new
        )
        self.model_requests_total = Counter(
            "model_requests_total",
            "Generation requests by model, as instances call it, and HTTP status, as long as instances serve different "
            "models.",
            ("model", "code"),
            **new,
        )
        self.request_end_total = Counter(
            "request_end_total",
            "Generation requests by who ended them and in which stage, as `term` in the log.",
            ("term",),
            **new,
        )
        self.request_duration_seconds = Histogram(
            "request_duration_seconds",
            "Time from a generation request to the end of its answer.",
            ("api", "stream"),
            buckets=_REQUEST_BUCKETS,
            **new,
        )
        self.time_to_first_token_seconds = Histogram(
            "time_to_first_token_seconds",
            "Time from a generation request to the first token of its streamed answer.",
            ("api",),
            buckets=_FIRST_TOKEN_BUCKETS,
            **new,
        )
        self.inter_token_seconds = GatheringHistogram(
            "inter_token_seconds",
            "Time between two parts of a streamed answer; a sample of one in eight.",
            buckets=_INTER_TOKEN_BUCKETS,
            **new,
        )
        self.settle_first(self.inter_token_seconds.settle)
        self.stage_duration_seconds = Histogram(
            "stage_duration_seconds",
            "Time in each stage, once for each prompt and sample of a generation request.",
            ("stage",),
            buckets=_STAGE_BUCKETS,
            **new,
        )
        self.inflight_requests = Gauge(
            "inflight_requests", "Client requests in flight.", ("api",), multiprocess_mode="livesum", **new
        )
        self.instance_requests_total = Counter(
            "instance_requests_total",
            "Requests sent to an instance, by result: `ok`, or the failure.",
            ("role", "address", "result"),
            **new,
        )
        self.retries_total = Counter(
            "retries_total",
            "Requests sent to engines again, by role and by the failure before.",
            ("stage", "reason"),
            **new,
        )
        self.retry_budget_exhausted_total = Counter(
            "retry_budget_exhausted_total",
            "Requests that failed because the retry budget had no place for a second attempt in time.",
            **new,
        )
        self.missing_kv_total = Counter(
            "missing_kv_total", "Prefill answers without KV parameters, by what was done next.", ("action",), **new
        )
        self.handovers_total = Counter(
            "handovers_total",
            "KV caches handed over, by what the decoders' own counters say: transferred, the prompt computed once "
            "more, or unknown.",
            ("result",),
            **new,
        )
        self.canaries_total = Counter(
            "canaries_total",
            "Test prompts of the gateway's own (doctor.every_seconds), by what they have shown.",
            ("result",),
            **new,
        )
        self.prefills_skipped_total = Counter(
            "prefills_skipped_total", "Prompts sent to a decoder alone: kv.prefill_min_tokens, kv.skip_prefill.", **new
        )
        self.streams_broken_total = Counter(
            "streams_broken_total",
            "Answers that ended early although their status had been sent, by who ended them and why.",
            ("side", "reason"),
            **new,
        )
        self.resumes_total = Counter(
            "resumes_total",
            "Answers continued after their decoder was lost, by its failure and by how they were continued.",
            ("cause", "action"),
            **new,
        )
        self.resumed_tokens_total = Counter(
            "resumed_tokens_total", "Tokens prefilled again to continue answers whose decoder was lost.", **new
        )
        self.resume_failures_total = Counter(
            "resume_failures_total", "Answers that had begun and could not be continued.", ("cause",), **new
        )
        self.suspect_requests_total = Counter(
            "suspect_requests_total", "Requests that were stopped because engines went down while serving them.", **new
        )
        self.tokens_total = Counter(
            "tokens_total", "Tokens of generation requests, as engines report them in `usage`.", ("kind",), **new
        )
        self.rejected_total = Counter(
            "rejected_total", "Requests refused before an engine was asked.", ("reason",), **new
        )
        self.kv_events_total = Counter(
            "kv_events_total",
            "KV events heard (kv_events), by instance and kind.",
            ("role", "address", "kind"),
            **new,
        )
        self.kv_event_gaps_total = Counter(
            "kv_event_gaps_total",
            "Times that an instance's KV events did not follow each other: some were `lost`, or came when they were "
            "asked for again (`replayed`), or it has started anew (`started_anew`).",
            ("role", "address", "reason"),
            **new,
        )
        self.kv_orphans_total = Counter(
            "kv_orphans_total", "Prefilled KV caches that no decoder is known to have fetched.", **new
        )
        self.kv_released_total = Counter(
            "kv_released_total",
            "Orphaned KV caches by what became of them: released, failed, or unsupported by the engines.",
            ("result",),
            **new,
        )
        self.instance_ejected_total = Counter(
            "instance_ejected_total",
            "Ejections of an instance because of how its requests went, by cause.",
            ("role", "address", "reason"),
            **new,
        )
        self.pair_quarantines_total = Counter(
            "pair_quarantines_total", "Times a prefiller and a decoder were parted after failed hand-overs.", **new
        )
        self.prefill_prediction_ratio = Histogram(
            "prefill_prediction_ratio",
            "What prefills took over what was predicted when their prefillers were chosen.",
            buckets=_RATIO_BUCKETS,
            **new,
        )
        self.prefill_hit_tokens_total = Counter(
            "prefill_hit_tokens_total",
            "Prompt tokens that prefillers were thought to have cached (`predicted`), and those that they had, if they "
            "tell that (`found`).",
            ("kind",),
            **new,
        )
        self.choices_total = Counter(
            "choices_total",
            "Choices of an instance for an attempt at a generation request, by role and by why it was this one.",
            ("role", "reason"),
            **new,
        )
        self.queue_waits_total = Counter(
            "queue_waits_total",
            "Requests that had to wait, by what for: room at a `prefill` or `decode` instance, others that wait "
            "(`queue`), or a `better` prefiller than those with room.",
            ("reason",),
            **new,
        )
        self.queued_requests = Gauge(
            "queued_requests", "Requests waiting for an instance with room.", multiprocess_mode="livesum", **new
        )
        self.prefix_index_keys = Gauge(
            "prefix_index_keys",
            "Keys of prompts' prefixes that are remembered, of all workers: some 110 bytes each.",
            multiprocess_mode="livesum",
            **new,
        )
        self.queue_seconds = Histogram(
            "queue_seconds",
            "Time that requests waited for an instance with room; of those that had to wait.",
            buckets=_STAGE_BUCKETS,
            **new,
        )
        self.http_parse_errors_total = Counter(
            "http_parse_errors_total", "Requests that were not valid HTTP/1.1.", **new
        )
        self.workers = Gauge("workers", "Worker processes that serve.", multiprocess_mode="livesum", **new)
        self.connections = Gauge("connections", "Open client connections.", multiprocess_mode="livesum", **new)
        self.loop_lag_seconds = Gauge(
            "loop_lag_seconds",
            "How late the event loop ran at worst in the last 15 seconds.",
            multiprocess_mode="livemax",
            **new,
        )
        self.cpu_seconds_total = Counter(
            "cpu_seconds_total", "CPU time of the gateway, of all workers since each began.", **new
        )
        self.resident_memory_bytes = Gauge(
            "resident_memory_bytes",
            "Memory of the gateway, of all workers; what they share counts for each.",
            multiprocess_mode="livesum",
            **new,
        )
        self.memory_share = Gauge(
            "memory_share",
            "Memory in use, as a share of what the container or the host allows.",
            multiprocess_mode="livemax",
            **new,
        )
        self.open_fds_share = Gauge(
            "open_fds_share",
            "File descriptors in use, as a share of what the process may open.",
            multiprocess_mode="livemax",
            **new,
        )
        self.overload_state = Gauge(
            "overload_state",
            "0: memory suffices; 1: connections are closed after each answer; 2: new requests are refused.",
            multiprocess_mode="livemax",
            **new,
        )
        self.replicas_peers = Gauge(
            "replicas_peers",
            "Other gateways of the group (replicas.group) whose loads are known now.",
            multiprocess_mode="livesum",
            **new,
        )
        self.replicas_exchanges_total = Counter(
            "replicas_exchanges_total", "Exchanges with the store of the replicas, by result.", ("result",), **new
        )
        self.replicas_news_total = Counter(
            "replicas_news_total",
            "Messages about changes between the gateways of the group, by whether this one told or heard them.",
            ("direction",),
            **new,
        )
        self.replicas_news_bytes_total = Counter(
            "replicas_news_bytes_total", "Bytes of these messages.", ("direction",), **new
        )
        self.replicas_last_exchange_timestamp_seconds = Gauge(
            "replicas_last_exchange_timestamp_seconds",
            "When the store of the replicas last answered, in seconds since the Unix epoch; 0: it did not yet.",
            multiprocess_mode="livemax",
            **new,
        )
        self.background_restarts_total = Counter(
            "background_restarts_total",
            "Restarts of a background loop after an unexpected error, by loop. The log has the first error in a row.",
            ("loop",),
            **new,
        )
        self.config_reloads_total = Counter(
            "config_reloads_total", "Reloads of the configuration by result.", ("result",), **new
        )
        self.config_last_reload_successful = Gauge(
            "config_last_reload_successful",
            "1 if the last reload of the configuration was applied, 0 if it was refused.",
            multiprocess_mode="livemostrecent",
            **new,
        )
        self.config_last_reload_success_timestamp_seconds = Gauge(
            "config_last_reload_success_timestamp_seconds",
            "When the configuration in use was loaded, in seconds since the Unix epoch.",
            multiprocess_mode="livemax",
            **new,
        )
        self.dns_errors_total = Counter(
            "dns_errors_total", "Failed look-ups of instances' names; the last known addresses stay in use.", **new
        )
        self.whole_answers_repeated_total = Counter(
            "whole_answers_repeated_total",
            "Answers that were asked for again as a whole, because the engine's stream lost a tool call or broke its "
            "arguments.",
            **new,
        )
        self.sse_bad_events_total = Counter(
            "sse_bad_events_total", "Events of engines' streams that cannot be read.", **new
        )
        self.log_lines_dropped_total = Counter(
            "log_lines_dropped_total", "Log lines dropped because the log was not read in time.", **new
        )
        self.log_lines_suppressed_total = Counter(
            "log_lines_suppressed_total", "Log lines left out because too many of a kind came at once.", **new
        )
        self._show_known_series()
        if is_shared:
            self._files = WorkerFiles(self._registry)

    def watch_instances(
        self,
        pools: Iterable[Pool],
        scoreboard: Scoreboard,
        health: Health,
        misfits: Misfits,
        pool_of: Callable[[Backend], Pool] | None = None,
    ) -> None:
        """From now on every scrape tells about the instances that these have at that moment; see Instances."""
        self._instances = Instances(tuple(pools), scoreboard, health, misfits, pool_of)

    def watch_models(self, models: Models, pools: Iterable[Pool]) -> None:
        """From now on every scrape tells how many instances each model has at that moment."""
        self._models = partial(collect_models, models, tuple(pools))

    def watch_sources(self, states: SourceStates, roster: Roster) -> None:
        """From now on every scrape tells about the sources of discovery that there are at that moment."""
        self._sources = partial(collect_sources, states, roster)

    def settle_first(self, settle: Callable[[], None]) -> None:
        """From now on this is called before every scrape and at every `settle`: it counts what waits to be counted."""
        self._settles.append(settle)

    def settle(self) -> None:
        """Count what waits to be counted. To be called now and then: other workers are asked for these counts, too."""
        for settle in self._settles:
            settle()
        if self._files is not None:
            self._files.restore()

    def watch_workers(self, replacements: Callable[[], Mapping[str, int]]) -> None:
        """From now on every scrape tells how many workers were replaced, by reason."""
        self._worker_replacements = replacements

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition in the format that an Accept header asks for, and its content type."""
        return self.snapshot(accept)()

    def snapshot(self, accept: str) -> Callable[[], tuple[bytes, str]]:
        """What `render` gives. This reads what belongs to the event loop's thread, the result may be called in another
        one: it takes ten times as long, 30 ms with 4 workers and 64 instances.
        """
        encode, content_type = choose_encoder(accept)
        families = self._families()
        return lambda: (encode(_Families(families)), content_type)

    def collect(self) -> Iterator[Metric]:
        """What prometheus-client's encoders ask for."""
        return self._families()

    def _families(self) -> Iterator[Metric]:
        """All metrics. What the event loop owns is read now, what prometheus-client keeps when somebody iterates."""
        self.settle()
        instances = set() if self._instances is None else set(self._instances.names())
        for name in instances:
            self.instance_requests_total.labels(*name, "ok")
            for reason in EJECTIONS:
                self.instance_ejected_total.labels(*name, reason)
            for kind in KV_EVENTS:
                self.kv_events_total.labels(*name, kind)
            for gap in KV_EVENT_GAPS:
                self.kv_event_gaps_total.labels(*name, gap)
        told: list[Metric] = [] if self._instances is None else list(self._instances.collect())
        if self._models is not None:
            told += self._models()
        if self._sources is not None:
            told += self._sources()
        if self._worker_replacements is not None:
            replaced = CounterMetricFamily(
                "pdproxy_worker_replacements",
                "Workers that were replaced, because they died or stood still.",
                labels=("reason",),
            )
            for reason, count in self._worker_replacements().items():
                replaced.add_metric((reason,), count)
            told.append(replaced)
        return chain(self._recorded(instances), told)

    def _recorded(self, instances: Collection[tuple[str, str]]) -> Iterator[Metric]:
        """What was counted, by all workers; of instances only those that there are."""
        for family in self._registry.collect() if self._files is None else self._files.collect():
            # Left out here, because the files that workers share cannot forget an instance.
            family.samples = [
                sample
                for sample in family.samples
                if "address" not in sample.labels or (sample.labels["role"], sample.labels["address"]) in instances
            ]
            yield family

    def _show_known_series(self) -> None:
        """Series whose labels are known begin at 0, because a rate does not see the step from nothing to 1."""
        compiled = str(IS_COMPILED).lower()
        self.build_info.labels(__version__, compiled, platform.python_version(), aiohttp.__version__).set(1)
        self.workers.set(1)
        known: list[tuple[Counter | Gauge | Histogram, Iterable[tuple[str, ...]]]] = [
            (self.requests_total, product(APIS, ("200",))),
            (self.request_end_total, product(TERMS)),
            (self.stage_duration_seconds, product(STAGES)),
            (self.inflight_requests, product(APIS)),
            (self.retries_total, product(LEGS, FAILURES)),
            (self.missing_kv_total, product(MISSING_KV_ACTIONS)),
            (self.handovers_total, product(HANDOVERS)),
            (self.canaries_total, product(CANARIES)),
            (self.kv_released_total, product(RELEASES)),
            (self.streams_broken_total, BROKEN_STREAMS),
            (self.resumes_total, product(FAILURES, RESUME_ACTIONS)),
            (self.resume_failures_total, product(FAILURES)),
            (self.tokens_total, product(TOKEN_KINDS)),
            (self.rejected_total, product(REJECTIONS)),
            (self.prefill_hit_tokens_total, product(("predicted", "found"))),
            (self.choices_total, product(CHOOSING_ROLES, REASONS)),
            (self.queue_waits_total, product(("prefill", "decode", "encode", "queue", "better"))),
            (self.background_restarts_total, product(BACKGROUND_LOOPS)),
            (self.config_reloads_total, product(("ok", "failed"))),
            (self.replicas_exchanges_total, product(("ok", "failed"))),
            (self.replicas_news_total, product(("told", "heard"))),
            (self.replicas_news_bytes_total, product(("told", "heard"))),
        ]
        _show_series(known)

    def show_generation_series(self, apis: Iterable[str]) -> None:
        """The same for the routes that generate, whose labels these are."""
        apis = tuple(apis)
        _show_series(
            [
                (self.requests_total, product(apis, ("200",))),
                (self.inflight_requests, product(apis)),
                (self.request_duration_seconds, product(apis, ("true", "false"))),
                (self.time_to_first_token_seconds, product(apis)),
            ]
        )


class _Families:
    """Metrics, as prometheus-client's encoders ask for them."""

    def __init__(self, families: Iterator[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families


def _show_series(known: Iterable[tuple[Counter | Gauge | Histogram, Iterable[tuple[str, ...]]]]) -> None:
    """Make these series, so that they are there from the first scrape on."""
    for metric, series in known:
        for labels in series:
            metric.labels(*labels)
