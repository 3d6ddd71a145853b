"""The metrics of client keys, read from their accounts at each scrape.

They stand apart from `key_usage`, which the supervisor imports. The supervisor must not import prometheus-client before
it has set the directory of the workers' metrics.
"""

from __future__ import annotations

from operator import add, itemgetter
from typing import TYPE_CHECKING, Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from proxy.observe.key_usage import (
    BUCKET_FIELD,
    ENGINE_FIELD,
    FIRST_TOKEN_BUCKETS,
    FIRST_TOKEN_FIELD,
    RESULTS,
    ROLES,
    TOKEN_FIELD,
    TOKEN_KINDS,
    no_values,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client import Metric

    from proxy.observe.key_usage import KeyAccounts

OTHER_KEYS: Final = "(other)"
"""Label of the keys beyond `auth.max_key_series`. No key can have this name."""


def collect_keys(
    accounts: KeyAccounts, slots: Mapping[str, int], max_series: int, in_flight: Callable[[int], int]
) -> Iterator[Metric | None]:
    """Yield None after each key, where the caller may pause, and then all metrics of client keys.

    Args:
        accounts: The accounts of all workers.
        slots: The slots of the present client keys by name.
        max_series: Maximum number of keys with separate series. The other keys are added together as OTHER_KEYS. 0: no
            key has series.
        in_flight: Returns the requests in flight of a slot, over all workers of this gateway.
    """
    requests = CounterMetricFamily(
        "pdproxy_key_requests",
        "Generation requests by client key and result: `ok`, `failed`, `limited` (beyond a limit of the key), "
        "`rejected` (for another reason), or `left` (the client disconnected).",
        labels=("key", "result"),
    )
    tokens = CounterMetricFamily(
        "pdproxy_key_tokens",
        "Tokens of generation requests by client key, as the clients' `usage` counts them.",
        labels=("key", "kind"),
    )
    engine_seconds = CounterMetricFamily(
        "pdproxy_key_engine_seconds",
        "Time that engines spent on the requests of a client key: encoding and prefill, or handoff and decode.",
        labels=("key", "role"),
    )
    first_tokens = HistogramMetricFamily(
        "pdproxy_key_time_to_first_token_seconds",
        "Time from a generation request to the first token of its streamed answer, by client key.",
        labels=("key",),
    )
    in_flight_gauge = GaugeMetricFamily(
        "pdproxy_key_inflight_requests", "Requests of a client key in flight.", labels=("key",)
    )
    for row in _key_rows(accounts, slots, max_series, in_flight):
        yield None
        if row is None:
            continue
        name, values, running = row
        for result, count in zip(RESULTS, values, strict=False):
            requests.add_metric((name, result), count)
        for place, kind in enumerate(TOKEN_KINDS, TOKEN_FIELD):
            tokens.add_metric((name, kind), values[place])
        for place, role in enumerate(ROLES, ENGINE_FIELD):
            engine_seconds.add_metric((name, role), values[place] / 1e6)
        first_tokens.add_metric((name,), _cumulative_buckets(values[BUCKET_FIELD:]), values[FIRST_TOKEN_FIELD] / 1e6)
        in_flight_gauge.add_metric((name,), running)
    yield from (requests, tokens, engine_seconds, first_tokens, in_flight_gauge)


def _key_rows(
    accounts: KeyAccounts, slots: Mapping[str, int], max_series: int, in_flight: Callable[[int], int]
) -> Iterator[tuple[str, list[int], int] | None]:
    """Yield the label, the account and the requests in flight of each key that has series, and None for the others."""
    if max_series <= 0:
        return
    others, others_in_flight, has_others = no_values(), 0, False
    for place, (name, slot) in enumerate(sorted(slots.items(), key=itemgetter(1))):
        values, running = accounts.total_account(slot, name), in_flight(slot)
        if place < max_series:
            yield name, values, running
        else:
            others, others_in_flight, has_others = [*map(add, others, values)], others_in_flight + running, True
            yield None
    if has_others:
        yield OTHER_KEYS, others, others_in_flight


def _cumulative_buckets(counts: Iterable[int]) -> list[tuple[str, float]]:
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*map(str, FIRST_TOKEN_BUCKETS), "+Inf"), counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
