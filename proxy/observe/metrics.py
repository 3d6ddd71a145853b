"""Every metric of the gateway: name, help, labels and buckets, in one table.

Label values come from the configuration or from the tuples below, never from a request, so the number of series is
bounded. What is known about instances is read when somebody scrapes, and an instance that was removed loses its series.
With several workers prometheus-client keeps the values in files under `PROMETHEUS_MULTIPROC_DIR`, which must be set
before this module is imported, and every worker answers for all of them. See `worker_files.py`.
"""

from __future__ import annotations

import os
import platform
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

import aiohttp
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily

from proxy import __version__
from proxy.balancer.backend_health import Cause
from proxy.balancer.handoff_verdicts import HandoffVerdict
from proxy.balancer.pick import REASONS
from proxy.common.build_info import IS_COMPILED
from proxy.common.errors import Failure
from proxy.common.terms import KV_EVENT_GAPS, KV_EVENTS, Action, Stage
from proxy.observe.instances import Instances, collect_models, collect_sources
from proxy.observe.instruments import Counter, GatheringHistogram, Gauge, Histogram, MetricRow
from proxy.observe.worker_files import DIRECTORY, WorkerFiles, make_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from prometheus_client import Metric

    from proxy.balancer.health import Health
    from proxy.balancer.incompatibilities import Incompatibilities
    from proxy.balancer.models import ServedModels
    from proxy.balancer.pool import Pool
    from proxy.balancer.roster import Roster, SourceStates
    from proxy.balancer.shared.scoreboard import Scoreboard
    from proxy.common.backend import Backend

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
CANARIES: Final = (*(str(verdict) for verdict in HandoffVerdict), "differs", "failed", "busy")
HANDOVERS: Final = tuple(str(verdict) for verdict in HandoffVerdict)
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


class Metrics:
    """One worker's metrics: a table, one row for each. `render` returns what a scrape gets.

    Each Metrics has a registry of its own unless one is given.
    """

    build_info = MetricRow(
        Gauge,
        "Versions of the gateway, of Python and of aiohttp, and whether it is compiled. Always 1.",
        ("version", "compiled", "python", "aiohttp"),
        multiprocess_mode="livemax",
    )
    requests_total = MetricRow(
        Counter, "Client requests by API and HTTP status.", ("api", "code"), series=product(APIS, ("200",))
    )
    model_requests_total = MetricRow(
        Counter,
        "Generation requests by model, as instances call it, and HTTP status, as long as instances serve different "
        "models.",
        ("model", "code"),
    )
    request_end_total = MetricRow(
        Counter,
        "Generation requests by who ended them and in which stage, as `term` in the log.",
        ("term",),
        series=product(TERMS),
    )
    request_duration_seconds = MetricRow(
        Histogram,
        "Time from a generation request to the end of its answer.",
        ("api", "stream"),
        buckets=_REQUEST_BUCKETS,
    )
    time_to_first_token_seconds = MetricRow(
        Histogram,
        "Time from a generation request to the first token of its streamed answer.",
        ("api",),
        buckets=_FIRST_TOKEN_BUCKETS,
    )
    inter_token_seconds = MetricRow(
        GatheringHistogram,
        "Time between two parts of a streamed answer; a sample of one in eight.",
        buckets=_INTER_TOKEN_BUCKETS,
    )
    stage_duration_seconds = MetricRow(
        Histogram,
        "Time in each stage, once for each prompt and sample of a generation request.",
        ("stage",),
        series=product(STAGES),
        buckets=_STAGE_BUCKETS,
    )
    inflight_requests = MetricRow(
        Gauge, "Client requests in flight.", ("api",), series=product(APIS), multiprocess_mode="livesum"
    )
    instance_requests_total = MetricRow(
        Counter, "Requests sent to an instance, by result: `ok`, or the failure.", ("role", "address", "result")
    )
    retries_total = MetricRow(
        Counter,
        "Requests sent to engines again, by role and by the failure before.",
        ("stage", "reason"),
        series=product(LEGS, FAILURES),
    )
    retry_budget_exhausted_total = MetricRow(
        Counter, "Requests that failed because the retry budget had no place for a second attempt in time."
    )
    missing_kv_total = MetricRow(
        Counter,
        "Prefill answers without KV parameters, by what was done next.",
        ("action",),
        series=product(MISSING_KV_ACTIONS),
    )
    handovers_total = MetricRow(
        Counter,
        "KV caches handed over, by what the decoders' own counters say: transferred, the prompt computed once "
        "more, or unknown.",
        ("result",),
        series=product(HANDOVERS),
    )
    canaries_total = MetricRow(
        Counter,
        "Test prompts of the gateway's own (doctor.every_seconds), by what they have shown.",
        ("result",),
        series=product(CANARIES),
    )
    prefills_skipped_total = MetricRow(
        Counter, "Prompts sent to a decoder alone: kv.prefill_min_tokens, kv.skip_prefill."
    )
    streams_broken_total = MetricRow(
        Counter,
        "Answers that ended early although their status had been sent, by who ended them and why.",
        ("side", "reason"),
        series=BROKEN_STREAMS,
    )
    resumes_total = MetricRow(
        Counter,
        "Answers continued after their decoder was lost, by its failure and by how they were continued.",
        ("cause", "action"),
        series=product(FAILURES, RESUME_ACTIONS),
    )
    resumed_tokens_total = MetricRow(Counter, "Tokens prefilled again to continue answers whose decoder was lost.")
    resume_failures_total = MetricRow(
        Counter, "Answers that had begun and could not be continued.", ("cause",), series=product(FAILURES)
    )
    suspect_requests_total = MetricRow(
        Counter, "Requests that were stopped because engines went down while serving them."
    )
    tokens_total = MetricRow(
        Counter,
        "Tokens of generation requests, as engines report them in `usage`.",
        ("kind",),
        series=product(TOKEN_KINDS),
    )
    rejected_total = MetricRow(
        Counter, "Requests refused before an engine was asked.", ("reason",), series=product(REJECTIONS)
    )
    kv_events_total = MetricRow(
        Counter, "KV events heard (kv_events), by instance and kind.", ("role", "address", "kind")
    )
    kv_event_gaps_total = MetricRow(
        Counter,
        "Times that an instance's KV events did not follow each other: some were `lost`, or came when they were "
        "asked for again (`replayed`), or it has started anew (`started_anew`).",
        ("role", "address", "reason"),
    )
    kv_orphans_total = MetricRow(Counter, "Prefilled KV caches that no decoder is known to have fetched.")
    kv_released_total = MetricRow(
        Counter,
        "Orphaned KV caches by what became of them: released, failed, or unsupported by the engines.",
        ("result",),
        series=product(RELEASES),
    )
    instance_ejected_total = MetricRow(
        Counter, "Ejections of an instance because of how its requests went, by cause.", ("role", "address", "reason")
    )
    pair_quarantines_total = MetricRow(Counter, "Times a prefiller and a decoder were parted after failed hand-overs.")
    prefill_prediction_ratio = MetricRow(
        Histogram,
        "What prefills took over what was predicted when their prefillers were chosen.",
        buckets=_RATIO_BUCKETS,
    )
    prefill_hit_tokens_total = MetricRow(
        Counter,
        "Prompt tokens that prefillers were thought to have cached (`predicted`), and those that they had, if they "
        "tell that (`found`).",
        ("kind",),
        series=product(("predicted", "found")),
    )
    choices_total = MetricRow(
        Counter,
        "Choices of an instance for an attempt at a generation request, by role and by why it was this one.",
        ("role", "reason"),
        series=product(CHOOSING_ROLES, REASONS),
    )
    queue_waits_total = MetricRow(
        Counter,
        "Requests that had to wait, by what for: room at a `prefill` or `decode` instance, others that wait "
        "(`queue`), or a `better` prefiller than those with room.",
        ("reason",),
        series=product(("prefill", "decode", "encode", "queue", "better")),
    )
    queued_requests = MetricRow(Gauge, "Requests waiting for an instance with room.", multiprocess_mode="livesum")
    prefix_index_keys = MetricRow(
        Gauge,
        "Keys of prompts' prefixes that are remembered, of all workers: some 110 bytes each.",
        multiprocess_mode="livesum",
    )
    queue_seconds = MetricRow(
        Histogram,
        "Time that requests waited for an instance with room; of those that had to wait.",
        buckets=_STAGE_BUCKETS,
    )
    http_parse_errors_total = MetricRow(Counter, "Requests that were not valid HTTP/1.1.")
    workers = MetricRow(Gauge, "Worker processes that serve.", multiprocess_mode="livesum")
    connections = MetricRow(Gauge, "Open client connections.", multiprocess_mode="livesum")
    loop_lag_seconds = MetricRow(
        Gauge, "How late the event loop ran at worst in the last 15 seconds.", multiprocess_mode="livemax"
    )
    cpu_seconds_total = MetricRow(Counter, "CPU time of the gateway, of all workers since each began.")
    resident_memory_bytes = MetricRow(
        Gauge, "Memory of the gateway, of all workers; what they share counts for each.", multiprocess_mode="livesum"
    )
    memory_share = MetricRow(
        Gauge, "Memory in use, as a share of what the container or the host allows.", multiprocess_mode="livemax"
    )
    open_fds_share = MetricRow(
        Gauge, "File descriptors in use, as a share of what the process may open.", multiprocess_mode="livemax"
    )
    overload_state = MetricRow(
        Gauge,
        "0: memory suffices; 1: connections are closed after each answer; 2: new requests are refused.",
        multiprocess_mode="livemax",
    )
    replicas_peers = MetricRow(
        Gauge, "Other gateways of the group (replicas.group) whose loads are known now.", multiprocess_mode="livesum"
    )
    replicas_exchanges_total = MetricRow(
        Counter, "Exchanges with the store of the replicas, by result.", ("result",), series=product(("ok", "failed"))
    )
    replicas_news_total = MetricRow(
        Counter,
        "Messages about changes between the gateways of the group, by whether this one told or heard them.",
        ("direction",),
        series=product(("told", "heard")),
    )
    replicas_news_bytes_total = MetricRow(
        Counter, "Bytes of these messages.", ("direction",), series=product(("told", "heard"))
    )
    replicas_last_exchange_timestamp_seconds = MetricRow(
        Gauge,
        "When the store of the replicas last answered, in seconds since the Unix epoch; 0: it did not yet.",
        multiprocess_mode="livemax",
    )
    background_restarts_total = MetricRow(
        Counter,
        "Restarts of a background loop after an unexpected error, by loop. The log has the first error in a row.",
        ("loop",),
        series=product(BACKGROUND_LOOPS),
    )
    config_reloads_total = MetricRow(
        Counter, "Reloads of the configuration by result.", ("result",), series=product(("ok", "failed"))
    )
    config_last_reload_successful = MetricRow(
        Gauge,
        "1 if the last reload of the configuration was applied, 0 if it was refused.",
        multiprocess_mode="livemostrecent",
    )
    config_last_reload_success_timestamp_seconds = MetricRow(
        Gauge, "When the configuration in use was loaded, in seconds since the Unix epoch.", multiprocess_mode="livemax"
    )
    dns_errors_total = MetricRow(Counter, "Failed look-ups of instances' names; the last known addresses stay in use.")
    whole_answers_repeated_total = MetricRow(
        Counter,
        "Answers that were asked for again as a whole, because the engine's stream lost a tool call or broke its "
        "arguments.",
    )
    sse_bad_events_total = MetricRow(Counter, "Events of engines' streams that cannot be read.")
    log_lines_dropped_total = MetricRow(Counter, "Log lines dropped because the log was not read in time.")
    log_lines_suppressed_total = MetricRow(Counter, "Log lines left out because too many of a kind came at once.")

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
        for row in vars(type(self)).values():
            if isinstance(row, MetricRow):
                setattr(self, row.name, row.make(self._registry))
        self.settle_first(self.inter_token_seconds.settle)
        compiled = str(IS_COMPILED).lower()
        self.build_info.labels(__version__, compiled, platform.python_version(), aiohttp.__version__).set(1)
        self.workers.set(1)
        if is_shared:
            self._files = WorkerFiles(self._registry)

    def watch_instances(
        self,
        pools: Iterable[Pool],
        scoreboard: Scoreboard,
        health: Health,
        misfits: Incompatibilities,
        pool_of: Callable[[Backend], Pool] | None = None,
    ) -> None:
        """From now on every scrape tells about the instances that these have at that moment; see Instances."""
        self._instances = Instances(tuple(pools), scoreboard, health, misfits, pool_of)

    def watch_models(self, models: ServedModels, pools: Iterable[Pool]) -> None:
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

    def show_generation_series(self, apis: Iterable[str]) -> None:
        """Begin the series of these routes, which generate, at 0. Routes are told by the labels of their dialects."""
        for api in apis:
            self.requests_total.labels(api, "200")
            self.inflight_requests.labels(api)
            for stream in ("true", "false"):
                self.request_duration_seconds.labels(api, stream)
            self.time_to_first_token_seconds.labels(api)


class _Families:
    """Metrics, as prometheus-client's encoders ask for them."""

    def __init__(self, families: Iterator[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families
