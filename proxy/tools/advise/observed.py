"""Utilisation of prefillers and decoders, from the gateways' `/metrics` over some time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from prometheus_client.parser import text_string_to_metric_families

from proxy.tools.advise.split import Split

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# A line through fewer points, or through points that are closer together, cannot be extrapolated.
_LEAST_POINTS: Final = 5
_LEAST_SPREAD: Final = 1.3
_NAMES: Final = (
    *("pdproxy_instance_up", "pdproxy_instance_load_tokens", "pdproxy_queued_requests", "pdproxy_rejected_total"),
    *("pdproxy_stage_duration_seconds_count", "pdproxy_stage_duration_seconds_sum", "pdproxy_tokens_total"),
)
_FULL_QUEUE: Final = ("queue_full", "queue_timeout", "queue_predicted")


class Unknown(Exception):
    """The metrics lack a needed value, which the text names."""


@dataclass(slots=True)
class Sample:
    """One reading of all gateways. Counters are sums."""

    at: float
    """Time of the reading in seconds."""
    computing: Counter[str] = field(default_factory=Counter)
    """Tokens of running prefills, by prefiller."""
    healthy: dict[str, set[str]] = field(default_factory=lambda: {"prefill": set(), "decode": set()})
    """Addresses of healthy instances, by role."""
    waiting: float = 0.0
    refused: float = 0.0
    """Requests that were refused because the queue was full or they waited too long."""
    prefilled: float = 0.0
    stream_seconds: float = 0.0
    """Seconds of all streams together."""
    tokens: float = 0.0
    """Tokens of answers."""


def read(at: float, expositions: Iterable[str]) -> Sample:
    """Return one reading of all gateways.

    Raises Unknown if one has no metrics of pdproxy.

    Args:
        at: Seconds of a monotonic clock.
        expositions: Answers of all gateways to `GET /metrics`, in Prometheus' text format.
    """
    sample = Sample(at)
    for text in expositions:
        seen = False
        try:
            for family in text_string_to_metric_families(_ours(text)):
                for each in family.samples:
                    seen |= _take(sample, each.name, each.labels, each.value)
        except ValueError as error:
            raise Unknown(f"these are no metrics: {error}") from None
        if not seen:
            raise Unknown("these are no metrics of pdproxy's")
    return sample


def _ours(text: str) -> str:
    """Return the lines with needed metrics, because parsing all lines takes much longer."""
    return "\n".join(line for line in text.splitlines() if line.startswith(_NAMES)) + "\n"


def _take(sample: Sample, name: str, labels: dict[str, str], value: float) -> bool:
    match name, labels.get("role"), labels.get("stage"):
        case "pdproxy_instance_up", "prefill" | "decode" as role, _:
            if value:
                sample.healthy[role].add(labels["address"])
        case "pdproxy_instance_load_tokens", "prefill", _ if labels["kind"] == "compute":
            sample.computing[labels["address"]] += int(value)
        case "pdproxy_queued_requests", _, _:
            sample.waiting += value
        case "pdproxy_rejected_total", _, _ if labels["reason"] in _FULL_QUEUE:
            sample.refused += value
        case "pdproxy_stage_duration_seconds_count", _, "prefill":
            sample.prefilled += value
        case "pdproxy_stage_duration_seconds_sum", _, "stream":
            sample.stream_seconds += value
        case "pdproxy_tokens_total", _, _ if labels["kind"] == "completion":
            sample.tokens += value
        case _:
            return False
    return True


@dataclass(frozen=True, slots=True)
class Observed:
    """Conclusions from all readings."""

    split: Split
    streams: float
    """Concurrent streams of each decoder."""
    streams_when_full: float
    token_seconds: float
    """Seconds between two tokens of a stream."""
    notes: tuple[str, ...] = ()


def observed(samples: Sequence[Sample], token_seconds: float, streams_when_full: float | None = None) -> Observed:
    """Return the conclusions. Raises Unknown.

    Args:
        samples: Readings in order.
        token_seconds: A decoder is full when its tokens take this long.
        streams_when_full: Number of streams of a full decoder; None if not known.
    """
    first, last = samples[0], samples[-1]
    prefillers, decoders = (len(last.healthy[role]) for role in ("prefill", "decode"))
    if not prefillers or not decoders:
        raise Unknown("there are not both a healthy prefiller and a healthy decoder")
    seconds, tokens = last.at - first.at, last.tokens - first.tokens
    if tokens <= 0 or seconds <= 0:
        raise Unknown("no answer ended in this time; watch for longer, while there is load")
    notes = []
    streams = (last.stream_seconds - first.stream_seconds) / seconds / decoders
    pace = (last.stream_seconds - first.stream_seconds) / tokens
    full = streams_when_full or _full(samples, decoders, token_seconds)
    if full is None:
        # A step with more streams takes longer, but less than in proportion, so this is an upper bound.
        full = streams * token_seconds / pace if pace else float("inf")
        notes.append(
            f"how many streams a decoder can have at {1000 * token_seconds:g} ms a token is a guess on the low side,"
            " since their number hardly changed; --decode-streams says it"
        )
    split = Split(prefillers, decoders, _prefill_busy(samples), streams / full if full else 0.0)
    return Observed(split, streams, full, pace, tuple(notes))


def _prefill_busy(samples: Sequence[Sample]) -> float:
    """Return the share of time in which prefillers compute, plus the refused demand."""
    shares = [
        sum(sample.computing[address] > 0 for address in healthy) / len(healthy)
        for sample in samples
        if (healthy := sample.healthy["prefill"])
    ]
    first, last = samples[0], samples[-1]
    unserved = max(0.0, last.waiting - first.waiting) + last.refused - first.refused
    return sum(shares) / len(shares) * (1 + unserved / max(1.0, last.prefilled - first.prefilled))


def _full(samples: Sequence[Sample], decoders: int, token_seconds: float) -> float | None:
    """Return the number of streams at which the time per token reaches its bound, by a linear fit; None: not known."""
    points = [
        (streams / (after.at - before.at) / decoders, streams / tokens)
        for before, after in pairwise(samples)
        if (tokens := after.tokens - before.tokens) > 0
        and (streams := after.stream_seconds - before.stream_seconds) > 0
        and after.at > before.at
    ]
    if len(points) < _LEAST_POINTS or max(points)[0] < _LEAST_SPREAD * min(points)[0]:
        return None
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    if slope <= 0:
        return None
    full = mean_x + (token_seconds - mean_y) / slope
    return full if full > 0 else None
