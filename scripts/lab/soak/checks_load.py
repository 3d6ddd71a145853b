"""What the gateway holds: load, memory, file descriptors."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from lab.soak.evidence import KILL_WORKER

if TYPE_CHECKING:
    from lab.soak.evidence import Evidence

_LOADS = ("pdproxy_instance_inflight", "pdproxy_instance_load_tokens", "pdproxy_inflight_requests")
_FDS_SLACK = 8
# What a worker takes once, when it first sees what can happen.
_RSS_SLACK_BYTES = 16 * 1024 * 1024
_RSS_SHARE = 0.05
_RSS_BYTES_PER_MINUTE = 1024 * 1024
_WARM_UP_SECONDS = 120.0
# A shorter time says nothing about a slope.
_SLOPE_SECONDS = 600.0


def leases(evidence: Evidence) -> list[str]:
    wrong = []
    ended = evidence.rest.by("pdproxy_instance_requests_total", "role", "address")
    # A lease that was moved, or left before its leg was sent, ends without a leg. No leg comes without a lease, but one
    # may come twice if it went on a connection that turned out to be closed.
    sent = Counter((leg.stage, leg.instance) for leg in evidence.legs if leg.stage != "release" and leg.answered)
    if not any(fault.kind == KILL_WORKER for fault in evidence.faults):
        wrong += [
            f"{instance}: {legs} {role} legs were answered, and {ended.get((role, instance), 0):.0f} leases ended"
            for (role, instance), legs in sent.items()
            if ended.get((role, instance), 0) < legs
        ]
    return wrong + [
        f"{name}{dict(labels)} is {value}"
        for sample in evidence.samples
        for (name, labels), value in sample.metrics.items()
        if name in _LOADS and value < 0
    ]


def sums(evidence: Evidence) -> list[str]:
    wrong = []
    most_units = max((answer.units for answer in evidence.answers), default=1)
    for sample in evidence.samples:
        requests = sum(sample.total("pdproxy_inflight_requests", api=api) for api in ("chat", "completions"))
        decode, prefill = (sample.total("pdproxy_instance_inflight", role=role) for role in ("decode", "prefill"))
        if prefill > decode or decode > requests * most_units:
            wrong.append(f"{requests:.0f} requests have {prefill:.0f} prefillers and {decode:.0f} decoders")
    return wrong


def nothing_left(evidence: Evidence) -> list[str]:
    left = ("pdproxy_queued_requests", *_LOADS)
    wrong = [f"{n}{dict(labels)} is {v}" for (n, labels), v in evidence.rest.metrics.items() if n in left and v]
    for instance, state in evidence.engines.items():
        wrong += [f"{instance}: {name} is {state[name]}" for name in ("live", "running", "waiting") if state.get(name)]
    return wrong


def nothing_grows(evidence: Evidence) -> list[str]:
    base, rest = evidence.base, evidence.rest
    wrong = []
    if rest.fds > base.fds + _FDS_SLACK:
        wrong.append(f"{base.fds} file descriptors before, {rest.fds} after")
    # A worker that was killed took its memory with it, and the new one has not grown yet: the sum only seems to fall.
    if rest.rss_bytes > base.rss_bytes * (1 + _RSS_SHARE) + _RSS_SLACK_BYTES * evidence.limits.workers:
        wrong.append(f"{base.rss_bytes >> 20} MiB before, {rest.rss_bytes >> 20} MiB after")
    slope = _slope([(s.at - base.at, s.rss_bytes) for s in evidence.samples if s.at > base.at + _WARM_UP_SECONDS])
    if slope > _RSS_BYTES_PER_MINUTE:
        wrong.append(f"memory grows by {slope / 2**20:.1f} MiB a minute")
    return wrong


def _slope(points: list[tuple[float, float]]) -> float:
    """Growth per minute, by least squares; 0 if that is too short a time."""
    if len(points) < 2 or points[-1][0] - points[0][0] < _SLOPE_SECONDS:
        return 0.0
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = math.fsum((x - mean_x) ** 2 for x, _ in points)
    return 60.0 * math.fsum((x - mean_x) * (y - mean_y) for x, y in points) / spread
