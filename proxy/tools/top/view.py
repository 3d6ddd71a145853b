"""The displayed view of two scrapes: some figures of the gateway, and a row for each instance. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.tools.top.scrape import growth, quantile, rate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.tools.top.scrape import Scrape

_STATES: Final = ("unknown", "up", "down", "ejected", "on probation")
"""Names of states, by value of pdproxy_instance_state."""
_ROLES: Final = ("prefill", "decode", "encode")

HEADINGS: Final = ("role", "instance", "state", "flight", "KV", "req/s", "fail/s", "pinned", "misfits")
"""Headings of the columns, short enough for 80 characters. `KV` is in tokens."""


@dataclass(frozen=True, slots=True)
class Row:
    """The row of one instance."""

    role: str
    address: str
    state: str
    in_flight: int
    kv_tokens: int
    requests_per_second: float
    failures_per_second: float
    pinned_kv: int
    misfits: str

    @property
    def is_well(self) -> bool:
        """Return whether the instance is up and fits the others."""
        return self.state == "up" and not self.misfits

    def cells(self) -> Sequence[str]:
        """Return the displayed texts."""
        return (
            self.role,
            self.address,
            self.state,
            f"{self.in_flight:,}",
            f"{self.kv_tokens:,}",
            f"{self.requests_per_second:,.1f}",
            f"{self.failures_per_second:,.1f}",
            f"{self.pinned_kv:,}",
            self.misfits,
        )


@dataclass(frozen=True, slots=True)
class View:
    """The displayed view."""

    lines: Sequence[str]
    """Lines about the gateway."""
    rows: Sequence[Row]


def view(before: Scrape, after: Scrape) -> View:
    """Return the view of the time between two scrapes, and of the state at the second."""
    return View(tuple(_lines(before, after)), tuple(_rows(before, after)))


def _lines(before: Scrape, after: Scrape) -> Sequence[str]:
    bad = sum(
        count
        for labels, count in growth(before, after, "pdproxy_requests_total").items()
        if dict(labels)["code"].startswith("5")
    )
    seconds = max(after.at - before.at, 1e-9)

    def per_second(name: str, **labels: str) -> str:
        number = rate(before, after, f"pdproxy_{name}", **labels)
        return f"{number:,.0f}/s" if number >= 100 else f"{number:,.1f}/s"

    def now(name: str) -> str:
        return f"{after.total(f'pdproxy_{name}'):,.0f}"

    def took(name: str, share: float) -> str:
        return _seconds(quantile(before, after, f"pdproxy_{name}", share))

    requests = (
        per_second("requests_total"),
        f"{now('inflight_requests')} in flight",
        f"{now('queued_requests')} queued",
        f"{bad / seconds:,.1f}/s are 5xx",
        f"{per_second('streams_broken_total')} broken off",
        f"{per_second('resumes_total')} resumed",
    )
    tokens = (
        f"{per_second('tokens_total', kind='completion')} out",
        f"{per_second('tokens_total', kind='prompt')} in",
        f"{per_second('tokens_total', kind='cached')} of them cached",
    )
    latencies = (
        f"p50 {took('time_to_first_token_seconds', 0.5)}",
        f"p95 {took('time_to_first_token_seconds', 0.95)}",
        f"between tokens p95 {took('inter_token_seconds', 0.95)}",
    )
    gateway = (
        f"{rate(before, after, 'pdproxy_cpu_seconds_total'):.2f} cores",
        f"{now('connections')} connections",
        f"loop {1000 * after.total('pdproxy_loop_lag_seconds'):,.0f} ms late",
        f"memory {100 * after.total('pdproxy_memory_share'):.0f} %",
    )
    named = {"requests": requests, "tokens": tokens, "first token": latencies, "gateway": gateway}
    return [f"{name:12} {', '.join(parts)}" for name, parts in named.items()]


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _rows(before: Scrape, after: Scrape) -> Sequence[Row]:
    misfits: dict[tuple[str, str], list[str]] = {}
    for labels in after.by_labels("pdproxy_instance_misfit"):
        named = dict(labels)
        misfits.setdefault((named["role"], named["address"]), []).append(named["kind"])
    rows = []
    for labels, state in after.by_labels("pdproxy_instance_state").items():
        its = dict(labels)
        name = (its["role"], its["address"])
        name_all = "pdproxy_instance_requests_total"
        requests = rate(before, after, name_all, **its)
        rows.append(
            Row(
                *name,
                state=_STATES[int(state)] if 0 <= state < len(_STATES) else "unknown",
                in_flight=int(_of(after, "pdproxy_instance_inflight", its)),
                kv_tokens=int(_of(after, "pdproxy_instance_load_tokens", {**its, "kind": "kv"})),
                requests_per_second=requests,
                failures_per_second=max(0.0, requests - rate(before, after, name_all, **its, result="ok")),
                pinned_kv=int(_of(after, "pdproxy_instance_pinned_kv", its)),
                misfits=", ".join(sorted(misfits.get(name, ()))),
            )
        )
    return sorted(rows, key=lambda row: (_ROLES.index(row.role) if row.role in _ROLES else len(_ROLES), row.address))


def _of(scrape: Scrape, name: str, labels: dict[str, str]) -> float:
    return scrape.by_labels(name).get(tuple(sorted(labels.items())), 0.0)
