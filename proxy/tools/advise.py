"""`pdproxy advise`: the bottleneck of the fleet, and the effect of moving one instance to it."""

from __future__ import annotations

import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import orjson
from prometheus_client.parser import text_string_to_metric_families

from proxy.balancer.split import LEAST_GAIN, RoleSplit, recommend_split
from proxy.common.blocking_http import describe_request_error
from proxy.settings import SettingsError
from proxy.settings.mistakes import Parser
from proxy.tools.flag_numbers import positive_number
from proxy.tools.gateway_tls import add_tls_flags, make_tls_context

if TYPE_CHECKING:
    import argparse
    import ssl
    from collections.abc import Iterable, Sequence


def recommendation_text(now: RoleSplit) -> str:
    """Return the recommended numbers of instances as a sentence."""
    roles = {"prefill": "Prefillers", "decode": "Decoders"}
    if not max(now.prefill_busy, now.decode_busy):
        return "Nothing was asked for, so there is nothing to advise."
    told = f"{roles[now.busier_role]} are the bottleneck"
    best = recommend_split(now)
    if best is now:
        return (
            f"{told}, and moving one instance would not carry at least {LEAST_GAIN:.0%} more: leave it at "
            f"{now.split_name}."
        )
    move = "a decoder to prefill" if best.prefillers > now.prefillers else "a prefiller to decode"
    gain = best.load_capacity / now.load_capacity - 1
    return f"{told}: moving {move} ({best.split_name}) would carry {gain:.0%} more load."


# Utilisation of prefillers and decoders, from the gateways' `/metrics` over some time.


# A line through fewer points, or through points that are closer together, cannot be extrapolated.
_LEAST_POINTS: Final = 5
_LEAST_SPREAD: Final = 1.3
# Below both of these, the next request decides which role seems to be the bottleneck.
_LEAST_STREAMS: Final = 1.0
_LEAST_BUSY: Final = 0.1
_NAMES: Final = (
    *("pdproxy_instance_up", "pdproxy_instance_load_tokens", "pdproxy_queued_requests", "pdproxy_rejected_total"),
    *("pdproxy_stage_duration_seconds_count", "pdproxy_stage_duration_seconds_sum", "pdproxy_tokens_total"),
)
_FULL_QUEUE: Final = ("queue_full", "queue_timeout", "queue_predicted")


class MissingMetric(Exception):
    """The metrics lack a needed value, which the text names."""


@dataclass(slots=True)
class GatewayReading:
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


def read_metrics(at: float, expositions: Iterable[str]) -> GatewayReading:
    """Read the metrics of all gateways once.

    Raises MissingMetric if one has no metrics of pdproxy.

    Args:
        at: Seconds of a monotonic clock.
        expositions: Answers of all gateways to `GET /metrics`, in Prometheus' text format.
    """
    sample = GatewayReading(at)
    for text in expositions:
        seen = False
        try:
            for family in text_string_to_metric_families(_select_needed_lines(text)):
                for each in family.samples:
                    seen |= _add_sample_value(sample, each.name, each.labels, each.value)
        except ValueError as error:
            raise MissingMetric(f"the metrics cannot be parsed: {error}") from None
        if not seen:
            raise MissingMetric("these are not metrics of pdproxy")
    return sample


def _select_needed_lines(text: str) -> str:
    """Return the lines with needed metrics, because parsing all lines takes much longer."""
    return "\n".join(line for line in text.splitlines() if line.startswith(_NAMES)) + "\n"


def _add_sample_value(sample: GatewayReading, name: str, labels: dict[str, str], value: float) -> bool:
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
class DemandReport:
    """Conclusions from all readings of the gateways' metrics."""

    split: RoleSplit
    streams: float
    """Concurrent streams of each decoder."""
    streams_when_full: float
    token_seconds: float
    """Seconds between two tokens of a stream."""
    notes: tuple[str, ...] = ()


def observe_demand(
    samples: Sequence[GatewayReading], token_seconds: float, streams_when_full: float | None = None
) -> DemandReport:
    """Return the conclusions from all readings. Raises MissingMetric.

    Args:
        samples: Readings in order.
        token_seconds: A decoder is full when its tokens take this long.
        streams_when_full: Number of streams of a full decoder; None if not known.
    """
    first, last = samples[0], samples[-1]
    prefillers, decoders = (len(last.healthy[role]) for role in ("prefill", "decode"))
    if not prefillers or not decoders:
        raise MissingMetric("there is no healthy prefiller, or no healthy decoder")
    seconds, tokens = last.at - first.at, last.tokens - first.tokens
    if tokens <= 0 or seconds <= 0:
        raise MissingMetric("no answer ended in this time; watch for longer, while there is load")
    notes = []
    streams = (last.stream_seconds - first.stream_seconds) / seconds / decoders
    prefill_busy = _prefill_busy(samples)
    if streams < _LEAST_STREAMS and prefill_busy < _LEAST_BUSY:
        raise MissingMetric(
            f"the load is too low for advice: {streams:.1f} streams on each decoder, and prefillers compute "
            f"{prefill_busy:.0%} of the time; watch again under load"
        )
    pace = (last.stream_seconds - first.stream_seconds) / tokens
    full = streams_when_full or _estimate_streams_when_full(samples, decoders, token_seconds)
    if full is None:
        # A step with more streams takes longer, but less than in proportion, so this is an upper bound.
        full = streams * token_seconds / pace if pace else float("inf")
        notes.append(
            f"how many streams a decoder can have at {1000 * token_seconds:g} ms a token is a guess on the low side,"
            " since their number hardly changed; --decode-streams says it"
        )
    split = RoleSplit(prefillers, decoders, prefill_busy, streams / full if full else 0.0)
    return DemandReport(split, streams, full, pace, tuple(notes))


def _prefill_busy(samples: Sequence[GatewayReading]) -> float:
    """Return the share of time in which prefillers compute, plus the refused demand."""
    shares = [
        sum(sample.computing[address] > 0 for address in healthy) / len(healthy)
        for sample in samples
        if (healthy := sample.healthy["prefill"])
    ]
    first, last = samples[0], samples[-1]
    unserved = max(0.0, last.waiting - first.waiting) + last.refused - first.refused
    return sum(shares) / len(shares) * (1 + unserved / max(1.0, last.prefilled - first.prefilled))


def _estimate_streams_when_full(samples: Sequence[GatewayReading], decoders: int, token_seconds: float) -> float | None:
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


# The sub-command: its flags, scrapes and report.


_TIMEOUT_SECONDS: Final = 5.0
_MOST_BYTES: Final = 16 * 1024 * 1024
_FEWEST_SCRAPES: Final = 10
_MOST_SCRAPES: Final = 60
_DESCRIPTION: Final = """\
Watch the metrics of running gateways for a while. Report whether prefillers or decoders are the bottleneck, and the
effect of moving one instance to the other role."""


def main(argv: Sequence[str]) -> int:
    """Run the sub-command and return its exit code. Raises SettingsError."""
    flags = read_flags(argv)
    try:
        samples = _read_samples(flags.metrics, flags.seconds, make_tls_context(flags))
        found = observe_demand(samples, flags.token_ms / 1000, flags.decode_streams)
    except MissingMetric as error:
        print(f"pdproxy advise: {error}", file=sys.stderr)
        return 1
    print(report_as_json(found).decode() if flags.json else report_as_table(found))
    return 0


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Read the flags of the sub-command. Raises SettingsError."""
    parser = Parser(prog="pdproxy advise", description=_DESCRIPTION, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--metrics",
        action="append",
        required=True,
        metavar="URL",
        help="URL of the metrics of a gateway, as http://gateway:1999/metrics. Give all gateways that share the "
        "engines. Repeatable.",
    )
    add(
        "--seconds",
        type=positive_number,
        default=60.0,
        metavar="SECONDS",
        help="Time to watch the metrics, in seconds. Run it under load. Default: 60.",
    )
    add(
        "--token-ms",
        type=positive_number,
        default=100.0,
        metavar="MS",
        help="Time between two tokens at which a decoder counts as full, in milliseconds. Default: 100.",
    )
    add(
        "--decode-streams",
        type=positive_number,
        metavar="N",
        help="Number of streams with which a decoder counts as full. Default: learned from the metrics.",
    )
    add("--json", action="store_true", help="Print JSON instead of a table.")
    add_tls_flags(parser)
    return parser.parse_args(argv)


def _read_samples(urls: Sequence[str], seconds: float, tls: ssl.SSLContext) -> list[GatewayReading]:
    without_proxy = urllib.request.ProxyHandler({})  # without http_proxy
    opener = urllib.request.build_opener(without_proxy, urllib.request.HTTPSHandler(context=tls))
    began = time.monotonic()
    scrapes = min(_MOST_SCRAPES, max(_FEWEST_SCRAPES, round(seconds)))
    samples = []
    for number in range(scrapes + 1):
        time.sleep(max(0.0, began + number * seconds / scrapes - time.monotonic()))
        samples.append(read_metrics(time.monotonic(), [_get_text(opener, url) for url in urls]))
    return samples


def _get_text(opener: urllib.request.OpenerDirector, url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise SettingsError(f"--metrics: {url} is not a URL: use one such as http://gateway:1999/metrics")
    try:
        with opener.open(url, timeout=_TIMEOUT_SECONDS) as answer:
            return str(answer.read(_MOST_BYTES).decode(errors="replace"))
    except (OSError, ValueError, HTTPException) as error:
        reason = describe_request_error(getattr(error, "reason", error))
        raise MissingMetric(f"{url} does not answer: {reason}") from None


def report_as_table(found: DemandReport) -> str:
    """Return the report of `pdproxy advise` as text."""
    now = found.split
    lines = [f"{'split':16}{'prefillers busy':>17}{'decoders busy':>15}{'carries':>10}"]
    for split in now.neighbour_splits():
        name = f"{split.split_name} (now)" if split is now else split.split_name
        busy = f"{split.prefill_busy:17.0%}{split.decode_busy:15.0%}"
        lines.append(f"{name:16}{busy}{split.load_capacity:9.2f}×")
    pace = f"{1000 * found.token_seconds:.1f} ms a token"
    lines += [
        "",
        f"{found.streams:.1f} streams at each decoder, {pace}; full with {found.streams_when_full:.1f}.",
        *(f"Note: {note}." for note in found.notes),
        recommendation_text(now),
    ]
    return "\n".join(lines)


def report_as_json(found: DemandReport) -> bytes:
    """Return the report of `pdproxy advise` as JSON."""
    now = found.split
    splits = [
        {"split": each.split_name, **asdict(each), "carries": each.load_capacity} for each in now.neighbour_splits()
    ]
    return orjson.dumps(
        {
            "now": now.split_name,
            "advised": recommend_split(now).split_name,
            "bottleneck": now.busier_role,
            "verdict": recommendation_text(now),
            "splits": splits,
            "decode_streams": found.streams,
            "decode_streams_when_full": found.streams_when_full,
            "token_seconds": found.token_seconds,
            "notes": found.notes,
        },
        option=orjson.OPT_INDENT_2,
    )
