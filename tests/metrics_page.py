"""METRICS.md, as the code has it. `python -m tests.metrics_page` writes the page; a test fails while it is stale."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from proxy.balancer.health import Health
from proxy.balancer.incompatibilities import Incompatibilities, IncompatibilityKind
from proxy.balancer.models import ServedModels
from proxy.balancer.roster import Roster, SourceStates
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.terms import KV_EVENT_GAPS, KV_EVENTS
from proxy.dialects import DIALECTS
from proxy.observe.key_metrics import collect_keys
from proxy.observe.key_usage import RESULTS, TOKEN_KINDS, KeyAccounts
from proxy.observe.metrics import EJECTIONS, Metrics
from proxy.observe.verdict import CODES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prometheus_client import Metric

PAGE = Path(__file__).parent.parent / "METRICS.md"
COMMAND = ".venv/bin/python -m tests.metrics_page"

_HEAD = f"""\
# Metrics

`/metrics` reports these metrics for all workers together, in Prometheus' text format or in OpenMetrics:

    curl -s http://127.0.0.1:1999/metrics | grep ^pdproxy_instance_up
    pdproxy_instance_up{{address="127.0.0.1:7100",role="prefill"}} 1.0
    pdproxy_instance_up{{address="127.0.0.1:7200",role="decode"}} 1.0

With `admin.port` set, only that port has `/metrics`.
Series with known label values begin at 0. A removed instance loses its series. With one worker, `/metrics` also has the
`process_*` metrics of prometheus-client. [OPERATING.md](OPERATING.md) explains the mechanisms behind the numbers.

This page is generated from `proxy/observe/metrics.py` by `{COMMAND}`.
"""


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# Labels whose values are not listed: they depend on the deployment, or another page explains them.
_OPEN_LABELS = {
    "address": "`host:port` of an instance, the same as the target under which Prometheus scrapes the engine itself",
    "code": "the HTTP status; 499 if the client disconnected before it received one",
    "term": "the side that ended the request, and the stage; see [Log](OPERATING.md#log)",
    "version": "this gateway's version",
    "compiled": "`true` for the [compiled build](OPERATING.md#compiled), otherwise `false`",
    "python": "Python's version",
    "aiohttp": "aiohttp's version",
    "key": "the name of a [client key](OPERATING.md#client-keys), or `(other)` beyond `auth.max_key_series`",
    "source": "a [source of discovery](OPERATING.md#discovery), as an instance's `origins` name it",
    "role": "`prefill`, `decode`, `encode`",
    "section": "`listen`, `admin`, `engines`: a section of the [configuration](OPERATING.md#configuration)",
    "model": "a model or an adapter that an instance serves, see [Several models](OPERATING.md#several-models)",
}
_OPEN_LABELS_OF_METRIC = {
    ("pdproxy_instance_requests_total", "result"): "`ok`, or a [failure](OPERATING.md#error-codes)",
    ("pdproxy_key_requests_total", "result"): _quoted(RESULTS),
    ("pdproxy_key_tokens_total", "kind"): _quoted(TOKEN_KINDS),
    ("pdproxy_instance_load_tokens", "kind"): "`compute`, `kv`",
    ("pdproxy_instance_working_set_tokens", "kind"): "`used`, `limit`",
    ("pdproxy_instance_misfit", "kind"): (
        f"{_quoted(list(IncompatibilityKind))}: see [Warnings about instances](OPERATING.md#warnings-about-instances)"
    ),
    ("pdproxy_instance_ejected_total", "reason"): _quoted(EJECTIONS),
    ("pdproxy_status_reason", "code"): _quoted(CODES),
    ("pdproxy_status_reason", "kind"): "`instance`, `pair`, `key`, `side`, `worker`, `source`, `gateway`",
    ("pdproxy_status_reason", "subject"): "a name: an instance, a pair (`prefiller decoder`), a key, a role, …",
    ("pdproxy_kv_events_total", "kind"): _quoted(KV_EVENTS),
    ("pdproxy_kv_event_gaps_total", "reason"): _quoted(KV_EVENT_GAPS),
}


def series() -> Mapping[str, frozenset[str]]:
    """Return the names of all series in queries, each with the names of its labels."""
    families, labels = _families()
    found: dict[str, frozenset[str]] = {}
    for family in families:
        name = _name(family)
        names = [f"{name}_{end}" for end in ("bucket", "sum", "count")] if family.type == "histogram" else [name]
        for one in names:
            found[one] = frozenset(labels[name]) | ({"le"} if one.endswith("_bucket") else frozenset())
    return found


def _families() -> tuple[Sequence[Metric], Mapping[str, Sequence[str]]]:
    """All metrics, and the names of each one's labels."""
    metrics = Metrics()
    metrics.watch_instances((), Scoreboard(slots=1), Health(), Incompatibilities())
    metrics.watch_models(ServedModels(Roster((), (), Scoreboard(slots=1)), Health(), ()), ())
    metrics.show_generation_series(dialect.label for dialect in DIALECTS)
    metrics.watch_sources(SourceStates(), Roster((), (), Scoreboard(slots=1)))
    metrics.watch_keys(lambda: collect_keys(KeyAccounts(slots=1), {}, 0, lambda _: 0))
    metrics.watch_status(lambda: {"state": "healthy", "reasons": []})
    metrics.watch_workers(lambda: {"died": 0, "frozen": 0})
    families = [family for family in metrics.collect() if family.name.startswith("pdproxy_")]
    return families, _labels(metrics, families)


def page() -> str:
    """Return the whole page."""
    families, labels = _families()
    rows = [
        f"| `{_name(family)}` | {family.type} | {_quoted(labels[_name(family)])} | {family.documentation} |"
        for family in sorted(families, key=lambda family: family.name)
    ]
    return "\n".join(
        [
            _HEAD,
            "| metric | type | labels | meaning |",
            "|---|---|---|---|",
            *rows,
            "",
            "## Label values",
            "",
            "| label | of | values |",
            "|---|---|---|",
            *_label_rows(families, labels),
            "",
        ]
    )


def _name(family: Metric) -> str:
    """Return the name in queries. The parser of the exposition format removes the suffix of counters."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def _labels(metrics: Metrics, families: Sequence[Metric]) -> Mapping[str, Sequence[str]]:
    """Return the names of each metric's labels, which prometheus-client keeps private."""
    names_by_metric = {_name(family): tuple(getattr(family, "_labelnames", ())) for family in families}
    for attribute in dir(metrics):
        collector = getattr(metrics, attribute)
        if hasattr(collector, "describe"):
            (described,) = collector.describe()
            names_by_metric[_name(described)] = tuple(collector._labelnames)
    return names_by_metric


def _label_rows(families: Sequence[Metric], labels: Mapping[str, Sequence[str]]) -> Sequence[str]:
    metrics_of: dict[tuple[str, str], list[str]] = {}  # by label and its values
    for family in families:
        name = _name(family)
        for label in labels[name]:
            values = _OPEN_LABELS_OF_METRIC.get((name, label)) or _OPEN_LABELS.get(label) or _values(family, label)
            metrics_of.setdefault((label, values), []).append(name)
    return [
        f"| `{label}` | {'all' if label in _OPEN_LABELS else _quoted(sorted(names))} | {values} |"
        for (label, values), names in sorted(metrics_of.items())
    ]


def _values(family: Metric, label: str) -> str:
    """Return the values whose series begin at 0."""
    found = _quoted(list(dict.fromkeys(sample.labels[label] for sample in family.samples)))
    if not found:
        raise ValueError(f"{_name(family)} has no series from which the values of {label} follow: name them here")
    return found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
