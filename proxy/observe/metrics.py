"""All metrics of the gateway in one table: name, help, labels and buckets.

Label values come from the configuration or from the tuples below, never from a request, so the number of series is
bounded. Metrics of instances are read at each scrape, and a removed instance loses its series.

With several workers, prometheus-client keeps the values in files under `PROMETHEUS_MULTIPROC_DIR`. The variable must be
set before this module is imported. Each worker answers for all.
"""

from __future__ import annotations

import logging
import os
import platform
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import aiohttp
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector

from proxy import __version__
from proxy.balancer.backend_health import EjectionCause
from proxy.balancer.handoff_verdicts import HandoffVerdict
from proxy.balancer.pick import REASONS
from proxy.common.build_info import IS_COMPILED
from proxy.common.errors import Failure, GatewayError
from proxy.common.terms import KV_EVENT_GAPS, KV_EVENTS, Action, Stage
from proxy.observe.instances import InstanceMetrics, collect_models, collect_sources, collect_status
from proxy.observe.instruments import Counter, GatheringHistogram, Gauge, Histogram, MetricRow
from proxy.observe.key_usage import TOKEN_KINDS

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

logger = logging.getLogger("proxy.observe.worker_files")

DIRECTORY: Final = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable with the name of the directory."""

# A `_created` series for each counter and histogram would double the exposition without use.
disable_created_metrics()  # type: ignore[no-untyped-call]

APIS: Final = ("models", "tokenizer", "pooling", "sglang")
"""Labels of routes that do not generate. Other routes have the labels of their dialects."""
STAGES: Final = tuple(stage.label for stage in Stage)
LEGS: Final = ("prefill", "decode", "encode")
CHOOSING_ROLES: Final = ("prefill", "decode")
"""Roles whose choices are counted by reason."""
FAILURES: Final = tuple(str(failure) for failure in Failure)
MISSING_KV_ACTIONS: Final = ("retry_prefill", "local", "error")
CANARIES: Final = (*(str(verdict) for verdict in HandoffVerdict), "differs", "failed", "busy")
HANDOVERS: Final = tuple(str(verdict) for verdict in HandoffVerdict)
RELEASES: Final = ("released", "failed", "unsupported")
RESUME_ACTIONS: Final = tuple(str(action) for action in Action)
BACKGROUND_LOOPS: Final = (
    "canaries",
    "engine_comparison",
    "health_checks",
    "key_usage",
    "kv_events",
    "replica_exchange",
    "replica_listening",
    "replica_publishing",
)
REJECTIONS: Final = (
    *("invalid_request", "too_large", "no_healthy_prefill", "no_healthy_decode", "no_healthy_encode", "draining"),
    *("queue_full", "queue_timeout", "queue_predicted", "queue_deadline", "all_refuse"),
    *("buffers_full", "memory", "connections"),
    *("unauthorized", "key_concurrency", "key_rate", "key_tokens"),
    "suspect_request",
    *("malformed_http", "slow_header", "slow_body", "content_encoding"),
)
EJECTIONS: Final[tuple[str, ...]] = get_args(EjectionCause)
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
"""Termination states of requests, after HAProxy's.

The first letter is the side that ended the request: Client, Server (the engine), Proxy, K for an administrator; in
lower case for a timeout of that side. The second is the stage: Reading the request, Queue, Encoding media, preFill,
Handoff, waiting for the first Token, streaming Data.
"""

# Metrics that vLLM or the llm-d router has, too, have the same bounds, so that panels can show both.
_REQUEST_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 40, 60, 120, 300, 600, 1800, 3600)
_FIRST_TOKEN_BUCKETS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
)
_INTER_TOKEN_BUCKETS: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2)
_RATIO_BUCKETS: Final = (0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2, 4, 8)
_STAGE_BUCKETS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """All metrics of one worker, one row for each.

    `snapshot` returns the exposition. Each Metrics creates a registry unless one is given.
    """

    build_info = MetricRow(
        Gauge,
        "Versions of the gateway, of Python and of aiohttp, and whether it is compiled. Always 1.",
        ("version", "compiled", "python", "aiohttp"),
        multiprocess_mode="livemax",
    )
    desired_instances = MetricRow(
        Gauge,
        "Instances of this role that the demand of the last minute needs, for autoscalers. If the demand is not known, "
        "the number of available instances.",
        ("role",),
        multiprocess_mode="livemax",
    )
    role_moves_total = MetricRow(
        Counter,
        "Moves of elastic instances to this role by result: moved, or failed if the instance kept its old role.",
        ("role", "result"),
        series=product(CHOOSING_ROLES, ("moved", "failed")),
    )
    requests_total = MetricRow(
        Counter, "Client requests by API and HTTP status.", ("api", "code"), series=product(APIS, ("200",))
    )
    model_requests_total = MetricRow(
        Counter,
        "Generation requests by model and HTTP status, while instances serve different models. Names are those "
        "of instances, not aliases.",
        ("model", "code"),
    )
    request_end_total = MetricRow(
        Counter,
        "Generation requests by the side that ended them and the stage, as `term` in the log.",
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
        "Time in each stage, once for each prompt and sample of a generation request. handoff ends with the decoder's "
        "status line; an engine that sends it earlier shows the KV transfer in first_token.",
        ("stage",),
        series=product(STAGES),
        buckets=_STAGE_BUCKETS,
    )
    inflight_requests = MetricRow(
        Gauge, "Client requests in flight.", ("api",), series=product(APIS), multiprocess_mode="livesum"
    )
    instance_requests_total = MetricRow(
        Counter,
        "Requests sent to an instance, by result: `ok`, `invalid_request` if it rejected the request, or the failure.",
        ("role", "address", "result"),
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
        "Prefill answers without KV parameters, by the next action.",
        ("action",),
        series=product(MISSING_KV_ACTIONS),
    )
    handovers_total = MetricRow(
        Counter,
        "KV caches handed over, by the result in the decoders' counters: `transferred`, `computed` (the prompt was "
        "computed again), or `unknown`.",
        ("result",),
        series=product(HANDOVERS),
    )
    canaries_total = MetricRow(
        Counter,
        "Canaries, which are test prompts of the gateway (doctor.every_seconds), by outcome.",
        ("result",),
        series=product(CANARIES),
    )
    prefills_skipped_total = MetricRow(
        Counter, "Prompts that a decoder computed without a prefiller (kv.prefill_min_tokens, kv.skip_prefill)."
    )
    streams_broken_total = MetricRow(
        Counter,
        "Answers that ended early after their status was sent, by the side that ended them and the reason.",
        ("side", "reason"),
        series=BROKEN_STREAMS,
    )
    resumes_total = MetricRow(
        Counter,
        "Answers continued after their decoder was lost, by the cause of the loss and the kind of resume.",
        ("cause", "action"),
        series=product(FAILURES, RESUME_ACTIONS),
    )
    resumed_tokens_total = MetricRow(Counter, "Tokens prefilled again to continue answers whose decoder was lost.")
    resume_failures_total = MetricRow(
        Counter, "Answers that broke off and could not be continued, by cause.", ("cause",), series=product(FAILURES)
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
        Counter, "Requests rejected before an engine received them, by reason.", ("reason",), series=product(REJECTIONS)
    )
    kv_events_total = MetricRow(
        Counter, "KV events received (kv_events), by instance and kind.", ("role", "address", "kind")
    )
    kv_event_gaps_total = MetricRow(
        Counter,
        "Gaps in an instance's KV events: events were `lost`, or `replayed` on request, or the instance was restarted "
        "(`started_anew`).",
        ("role", "address", "reason"),
    )
    read_backs_total = MetricRow(
        Counter,
        "Prefill legs that named a decoder's KV cache of the previous answer, by result: `read`, or `failed` (the "
        "prompt was computed instead).",
        ("result",),
        series=product(("read", "failed")),
    )
    failed_transfers_total = MetricRow(
        Counter,
        "Transfers of KV cache that failed, as engines of a role count them in their metrics.",
        ("role",),
        series=product(("prefill", "decode")),
    )
    kv_orphans_total = MetricRow(Counter, "Prefilled KV caches that no decoder is known to have fetched.")
    kv_released_total = MetricRow(
        Counter,
        "Orphaned KV caches by result: `released`, `failed`, or `unsupported` by the engines.",
        ("result",),
        series=product(RELEASES),
    )
    instance_ejected_total = MetricRow(
        Counter, "Ejections of an instance because of how its requests went, by cause.", ("role", "address", "reason")
    )
    pair_quarantines_total = MetricRow(Counter, "Quarantines of a pair of prefiller and decoder after failed handoffs.")
    prefill_prediction_ratio = MetricRow(
        Histogram,
        "Duration of prefills, divided by the prediction when their prefillers were chosen.",
        buckets=_RATIO_BUCKETS,
    )
    prefill_hit_tokens_total = MetricRow(
        Counter,
        "Prompt tokens that prefillers were predicted to have cached (`predicted`), and that they had cached, as far "
        "as they report it (`found`).",
        ("kind",),
        series=product(("predicted", "found")),
    )
    choices_total = MetricRow(
        Counter,
        "Choices of an instance for an attempt at a generation request, by role and reason.",
        ("role", "reason"),
        series=product(CHOOSING_ROLES, REASONS),
    )
    queue_waits_total = MetricRow(
        Counter,
        "Requests that had to wait, by the reason: room at a `prefill` or `decode` instance, other queued requests "
        "(`queue`), a `better` prefiller than those with room, or room for their session in a prefix cache "
        "(`working_set`).",
        ("reason",),
        series=product(("prefill", "decode", "encode", "queue", "better", "working_set")),
    )
    resident_sessions = MetricRow(
        Gauge,
        "Sessions that keep their prefix in a cache, as known to the worker that knows most.",
        multiprocess_mode="livemax",
    )
    waiting_sessions = MetricRow(
        Gauge, "Turns of sessions that wait for room in a prefix cache.", multiprocess_mode="livesum"
    )
    resident_tokens_total = MetricRow(
        Counter,
        "Prompt tokens that sessions should have found in caches because they are residents (`expected`), and those of "
        "them that were evicted before (`lost`).",
        ("kind",),
        series=product(("expected", "lost")),
    )
    session_wait_seconds = MetricRow(
        Histogram,
        "Time that turns of sessions waited for room in a prefix cache.",
        buckets=_STAGE_BUCKETS,
    )
    session_waits_overdue_total = MetricRow(
        Counter, "Turns of sessions that were admitted because they had waited for admission.session_wait_seconds."
    )
    queued_requests = MetricRow(Gauge, "Requests waiting for an instance with room.", multiprocess_mode="livesum")
    prefix_index_keys = MetricRow(
        Gauge,
        "Remembered keys of prompts' prefixes, over all workers: about 110 bytes each.",
        multiprocess_mode="livesum",
    )
    queue_seconds = MetricRow(
        Histogram,
        "Time that queued requests waited for an instance with room.",
        buckets=_STAGE_BUCKETS,
    )
    http_parse_errors_total = MetricRow(Counter, "Requests that were not valid HTTP/1.1.")
    tls_handshake_failures_total = MetricRow(Counter, "Connections of clients whose TLS handshake failed.")
    tls_certificate_expiry_timestamp_seconds = MetricRow(
        Gauge,
        "End of the validity of the certificate in use, in seconds since the Unix epoch, by the section of the "
        "configuration that names it. NaN: TLS was disabled.",
        ("section",),
        multiprocess_mode="livemostrecent",
    )
    workers = MetricRow(Gauge, "Worker processes that serve.", multiprocess_mode="livesum")
    connections = MetricRow(Gauge, "Open client connections.", multiprocess_mode="livesum")
    loop_lag_seconds = MetricRow(
        Gauge, "Longest delay of the event loop in the last 15 seconds.", multiprocess_mode="livemax"
    )
    gather_seconds = MetricRow(
        Gauge,
        "Time for which tokens wait for further ones of their stream (stream.gather_seconds). 0: they do not wait.",
        multiprocess_mode="livemax",
    )
    cpu_seconds_total = MetricRow(Counter, "CPU time of all workers since each started.")
    resident_memory_bytes = MetricRow(
        Gauge, "Resident memory of all workers. Shared memory counts once for each worker.", multiprocess_mode="livesum"
    )
    memory_share = MetricRow(
        Gauge, "Memory in use, as a share of the limit of the container or the host.", multiprocess_mode="livemax"
    )
    open_fds_share = MetricRow(
        Gauge, "File descriptors in use, as a share of the limit of the process.", multiprocess_mode="livemax"
    )
    overload_state = MetricRow(
        Gauge,
        "0: memory suffices; 1: connections are closed after each answer; 2: new requests are rejected.",
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
        "Messages about changes between the gateways of the group: sent (`told`) or received (`heard`).",
        ("direction",),
        series=product(("told", "heard")),
    )
    replicas_news_bytes_total = MetricRow(
        Counter,
        "Bytes of the messages about changes between the gateways of the group.",
        ("direction",),
        series=product(("told", "heard")),
    )
    replicas_last_exchange_timestamp_seconds = MetricRow(
        Gauge,
        "Time of the last answer of the replicas' store, in seconds since the Unix epoch; 0: no answer yet.",
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
        "1 if the last reload of the configuration was applied, 0 if it was rejected.",
        multiprocess_mode="livemostrecent",
    )
    config_last_reload_success_timestamp_seconds = MetricRow(
        Gauge,
        "Time at which the current configuration was loaded, in seconds since the Unix epoch.",
        multiprocess_mode="livemax",
    )
    dns_errors_total = MetricRow(Counter, "Failed look-ups of instances' names; the last known addresses stay in use.")
    whole_answers_repeated_total = MetricRow(
        Counter,
        "Answers that were requested again without streaming, because the engine's stream lost a tool call or broke "
        "its arguments.",
    )
    sse_bad_events_total = MetricRow(Counter, "Events of engines' streams that cannot be read.")
    log_lines_dropped_total = MetricRow(Counter, "Log lines dropped because the log was not read in time.")
    log_lines_suppressed_total = MetricRow(Counter, "Log lines omitted because too many similar lines came at once.")

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._instance_metrics: InstanceMetrics | None = None
        self._worker_replacements: Callable[[], Mapping[str, int]] | None = None
        self._collect_sources: Callable[[], Iterable[Metric | None]] | None = None
        self._collect_models: Callable[[], Iterable[Metric | None]] | None = None
        self._collect_keys: Callable[[], Iterable[Metric | None]] | None = None
        self._collect_status: Callable[[], Mapping[str, Any]] | None = None
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
                setattr(self, row.name, row.make_metric(self._registry))
        self.call_before_scrape(self.inter_token_seconds.add_noted_values)
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
        incompatibilities: Incompatibilities,
        pool_of: Callable[[Backend], Pool] | None = None,
        rates: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Show the current state of these instances at every scrape; see Instances."""
        self._instance_metrics = InstanceMetrics(tuple(pools), scoreboard, health, incompatibilities, pool_of, rates)

    def watch_models(self, models: ServedModels, pools: Iterable[Pool]) -> None:
        """Show the current number of instances of each model at every scrape."""
        self._collect_models = partial(collect_models, models, tuple(pools))

    def watch_sources(self, states: SourceStates, roster: Roster) -> None:
        """Show the current state of discovery sources at every scrape."""
        self._collect_sources = partial(collect_sources, states, roster)

    def watch_keys(self, collect: Callable[[], Iterable[Metric | None]]) -> None:
        """Show the usage of client keys at every scrape; see `collect_keys`."""
        self._collect_keys = collect

    def watch_status(self, collect_status: Callable[[], Mapping[str, Any]]) -> None:
        """Show this verdict on the gateway at every scrape; see Verdicts."""
        self._collect_status = collect_status

    def call_before_scrape(self, callback: Callable[[], None]) -> None:
        """Call `callback` before every scrape and at every `callback` of these metrics.

        It counts values that were only noted so far.
        """
        self._settles.append(callback)

    def settle_noted_values(self) -> None:
        """Count all noted values. Must be called regularly, because other workers show these counts, too."""
        for settle in self._settles:
            settle()
        if self._files is not None:
            self._files.restore_files()

    def watch_workers(self, get_replacements: Callable[[], Mapping[str, int]]) -> None:
        """Show the number of replaced workers by reason at every scrape."""
        self._worker_replacements = get_replacements

    def collect(self) -> Iterable[Metric]:
        """Return all metrics. See `collect_in_steps`."""
        found: list[Iterable[Metric]] = []
        for _ in self.collect_in_steps(found):
            pass
        return chain.from_iterable(found)

    def collect_in_steps(self, found_metrics: list[Iterable[Metric]]) -> Iterator[None]:
        """Read the metrics in short steps, which must run in the event loop's thread, and add them to `found_metrics`.

        They are complete after the last step. Another thread may iterate over them, which takes ten times as long as
        the steps: prometheus-client reads its own state then.
        """
        instances = set() if self._instance_metrics is None else set(self._instance_metrics.role_and_name_pairs())
        yield
        for name in instances:
            self.instance_requests_total.labels(*name, "ok")
            for reason in EJECTIONS:
                self.instance_ejected_total.labels(*name, reason)
            for kind in KV_EVENTS:
                self.kv_events_total.labels(*name, kind)
            for gap in KV_EVENT_GAPS:
                self.kv_event_gaps_total.labels(*name, gap)
            yield
        found_metrics.append(self._collect_recorded(instances))
        # In one step with the loads of instances: otherwise these contain requests that are not counted yet.
        self.settle_noted_values()
        if self._instance_metrics is not None:
            yield from self._instance_metrics.collect_in_steps(found_metrics)
        for collect in (self._collect_models, self._collect_sources, self._collect_keys):
            if collect is not None:
                family: list[Metric] = []
                for metric in collect():
                    if metric is not None:
                        family.append(metric)
                    yield
                found_metrics.append(family)
        if self._collect_status is not None:
            found_metrics.append(list(collect_status(self._collect_status())))
        if self._worker_replacements is not None:
            replaced = CounterMetricFamily(
                "pdproxy_worker_replacements",
                "Workers that were replaced because they died or froze.",
                labels=("reason",),
            )
            for reason, count in self._worker_replacements().items():
                replaced.add_metric((reason,), count)
            found_metrics.append([replaced])

    def _collect_recorded(self, instances: Collection[tuple[str, str]]) -> Iterator[Metric]:
        """Return the counts of all workers, without instances that were removed."""
        for family in self._registry.collect() if self._files is None else self._files.collect():
            # Removed here, because the files that workers share cannot forget an instance.
            family.samples = [
                sample
                for sample in family.samples
                if "address" not in sample.labels or (sample.labels["role"], sample.labels["address"]) in instances
            ]
            yield family

    def show_generation_series(self, apis: Iterable[str]) -> None:
        """Create the series of these generating routes at 0. `apis`: labels of their dialects."""
        for api in apis:
            self.requests_total.labels(api, "200")
            self.inflight_requests.labels(api)
            for stream in ("true", "false"):
                self.request_duration_seconds.labels(api, stream)
            self.time_to_first_token_seconds.labels(api)


def render_exposition(metric_families: Iterable[Metric], accept_header: str) -> tuple[bytes, str]:
    """Return the text of metrics and its content type. `accept_header`: the Accept header, which chooses the format."""
    encode, content_type = choose_encoder(accept_header)
    return encode(_FamilyCollector(metric_families)), content_type


class _FamilyCollector:
    """Metrics in the form that prometheus-client's encoders expect."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._metric_families = families

    def collect(self) -> Iterable[Metric]:
        return self._metric_families


class WorkerFiles:
    """The files of this process. Created after all metrics, as each kind of metric has one file."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._directory = Path(os.environ[DIRECTORY])
        self._files_by_name = {file._fname: file for file in _files_of(registry)}
        self.last_problem: str | None = None
        """Why the files are not there and cannot be created; None if they are there."""

    def restore_files(self) -> None:
        """Write the files again that were deleted, and their directory. An error is logged once, and kept."""
        try:
            for name, file in self._files_by_name.items():
                if not os.path.exists(name):
                    make_directory(self._directory)
                    _recreate_file(file)
        except OSError as error:
            if self.last_problem is None:
                logger.error("metrics: deleted directory cannot be created: %s: %s", self._directory, error)
            self.last_problem = str(error)
        else:
            if self.last_problem is not None:
                logger.info("metrics: directory exists again: %s", self._directory)
            self.last_problem = None

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of all workers. Raises GatewayError."""
        for is_last in (False, True):
            try:
                collector = MultiProcessCollector(None, self._directory)  # type: ignore[no-untyped-call]
                # A worker that starts creates an empty file, and then extends it. An empty file cannot be read.
                filled = [str(file) for file in self._directory.glob("*.db") if file.stat().st_size > 0]
                return collector.merge(filled, accumulate=True)  # type: ignore[no-any-return,no-untyped-call]
            except (ValueError, FileNotFoundError) as error:  # the directory, or a file in it, was just deleted
                if is_last:
                    message = f"the metrics' directory {self._directory} cannot be read: {self.last_problem or error}"
                    raise GatewayError(message, code="metrics_unavailable", status=503) from None
        raise AssertionError


def make_directory(directory: Path) -> None:
    """Create the directory for this user alone, unless it exists.

    Raises OSError, also if it belongs to another user, who could have created it in a public place.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if found.st_uid != os.geteuid() or directory.is_symlink():
        raise PermissionError(f"{directory} belongs to another user")


def _recreate_file(metrics_file: MmapedDict) -> None:
    """Continue with a new file of the same name and contents. Readers never see a part of it."""
    name = metrics_file._fname
    with open(f"{name}.new", "wb") as copy:
        copy.write(metrics_file._m)
    os.replace(f"{name}.new", name)
    new = MmapedDict(name)  # type: ignore[no-untyped-call]
    metrics_file.close()  # type: ignore[no-untyped-call]
    vars(metrics_file).update(vars(new))  # each metric holds this object


def _files_of(registry: CollectorRegistry) -> Iterator[MmapedDict]:
    for metric in registry._collector_to_names:
        if isinstance(metric, MetricWrapperBase):
            for one in (metric, *getattr(metric, "_metrics", {}).values()):
                value = getattr(one, "_sum", None) or getattr(one, "_value", None)
                if value is not None:
                    yield value._file
