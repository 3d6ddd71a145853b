"""`pdproxy top`: the activity of a running gateway, as a table that refreshes from its /metrics."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from proxy.common import blocking_http, histograms
from proxy.settings import SettingsError, connectable_host, load_settings
from proxy.settings.mistakes import Parser
from proxy.tools.flag_numbers import positive_number
from proxy.tools.gateway_tls import add_tls_flags, make_tls_context
from proxy.tools.keyboard import Keyboard

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import RenderableType

_STATES: Final = ("unknown", "up", "down", "ejected", "on probation")
"""Names of states, by value of pdproxy_instance_state."""
_ROLES: Final = ("prefill", "decode", "encode")

_SERVED: Final = ("ok", "invalid_request")
"""Results that are no failure of the instance."""

HEADINGS: Final = ("role", "instance", "state", "flight", "KV", "tok/s", "req/s", "fail/s", "pinned", "misfits")
"""Headings of the columns, short enough for 80 characters.

`KV` is a share of the KV memory, or tokens if the engine does not report its memory.
"""


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """The row of one instance in `pdproxy top`."""

    role: str
    address: str
    state: str
    in_flight: int
    kv_tokens: int
    kv_capacity: int | None
    """Tokens that fit into its KV memory; None: unknown."""
    tokens_per_second: float | None
    """Tokens that a decoder streams; None: it is no decoder."""
    requests_per_second: float
    failures_per_second: float
    pinned_kv: int
    misfits: str

    @property
    def is_well(self) -> bool:
        """Return whether the instance is up and fits the others."""
        return self.state == "up" and not self.misfits

    @property
    def _kv_share(self) -> float:
        return self.kv_tokens / self.kv_capacity if self.kv_capacity else 0.0

    def sort_value(self, heading: str) -> float | str:
        """Return the value by which rows are sorted in a column. The rows with the least value stand first."""
        values: dict[str, float | str] = {
            "flight": -self.in_flight,
            "KV": -(self._kv_share or self.kv_tokens),
            "tok/s": -(self.tokens_per_second or 0.0),
            "req/s": -self.requests_per_second,
            "fail/s": -self.failures_per_second,
            "instance": self.address,
        }
        return values[heading]

    def cells(self) -> Sequence[str]:
        """Return the displayed texts of the row."""
        return (
            self.role,
            self.address,
            self.state,
            f"{self.in_flight:,}",
            f"{self.kv_tokens:,}" if self.kv_capacity is None else f"{100 * self._kv_share:.0f} %",
            "" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f}",
            f"{self.requests_per_second:,.1f}",
            f"{self.failures_per_second:,.1f}",
            f"{self.pinned_kv:,}",
            self.misfits,
        )


@dataclass(frozen=True, slots=True)
class TopView:
    """The content that `pdproxy top` displays."""

    help: str = field(default="", kw_only=True)
    """The line that explains the keys. Empty: there is no keyboard."""

    lines: Sequence[str]
    """Lines about the gateway."""
    rows: Sequence[InstanceRow]
    keys: Sequence[Sequence[str]] = ()
    """Displayed texts of client keys, under KEY_HEADINGS. Empty without client keys."""


SORTS: Final = ("role", "flight", "KV", "tok/s", "req/s", "fail/s", "instance")
"""Columns by which the instances can be sorted. `role`: the order of a request. Other columns: the highest first."""


@dataclass(frozen=True, slots=True)
class ViewControls:
    """How the instances are arranged, as the keys have set it."""

    sort: str = SORTS[0]
    is_reversed: bool = False
    shows_only_bad: bool = False
    """Whether instances without a problem are left out."""
    is_paused: bool = False

    def pressed(self, key: str) -> ViewControls:
        """Return the controls after a key. Other keys change nothing."""
        if key in ("s", "S"):
            step = 1 if key == "s" else -1
            return replace(self, sort=SORTS[(SORTS.index(self.sort) + step) % len(SORTS)])
        if key == "r":
            return replace(self, is_reversed=not self.is_reversed)
        if key == "b":
            return replace(self, shows_only_bad=not self.shows_only_bad)
        if key in ("p", " "):
            return replace(self, is_paused=not self.is_paused)
        return self

    def arranged(self, shown: TopView) -> TopView:
        """Return the view with its rows in this order, and with the line of help."""
        rows = [row for row in shown.rows if not (self.shows_only_bad and row.is_well)]
        if self.sort != SORTS[0]:
            rows.sort(key=lambda row: row.sort_value(self.sort))
        if self.is_reversed:
            rows.reverse()
        order = f"{self.sort}, reversed" if self.is_reversed else self.sort
        bad = "all instances" if self.shows_only_bad else "only bad ones"
        pause = "go on" if self.is_paused else "pause"
        line = f"s sort (now: {order})   r reverse   b {bad}   p {pause}   q quit"
        return replace(shown, rows=rows, help=line)


def make_view(before: Scrape, after: Scrape) -> TopView:
    """Return the view of the time between two scrapes, and of the state at the second."""
    return TopView(tuple(_summary_lines(before, after)), tuple(_instance_rows(before, after)), _key_rows(before, after))


KEY_HEADINGS: Final = ("client key", "engines", "flight", "req/s", "limited", "reject", "in/s", "out/s", "p95")
"""Headings of the columns of client keys: `engines` is the share of engine time, `p95` the time to the first token."""
_SHOWN_KEYS: Final = 10


def _key_rows(before: Scrape, after: Scrape) -> Sequence[Sequence[str]]:
    """Return the rows of the client keys with the most engine time."""
    in_flight = {
        dict(labels)["key"]: value for labels, value in after.by_labels("pdproxy_key_inflight_requests").items()
    }
    seconds = {name: counter_rate(before, after, "pdproxy_key_engine_seconds_total", key=name) for name in in_flight}
    total_seconds = sum(seconds.values()) or 1.0

    def cells(name: str) -> Sequence[str]:
        def per_second(metric: str, **labels: str) -> str:
            return f"{counter_rate(before, after, f'pdproxy_key_{metric}_total', key=name, **labels):,.1f}"

        return (
            name,
            f"{100 * seconds[name] / total_seconds:.0f} %",
            f"{in_flight[name]:,.0f}",
            per_second("requests"),
            per_second("requests", result="limited"),
            per_second("requests", result="rejected"),
            per_second("tokens", kind="prompt"),
            per_second("tokens", kind="completion"),
            _format_seconds(
                histogram_quantile(before, after, "pdproxy_key_time_to_first_token_seconds", 0.95, key=name)
            ),
        )

    first = sorted(in_flight, key=lambda name: (-seconds[name], -in_flight[name], name))
    return [cells(name) for name in first[:_SHOWN_KEYS]]


def _summary_lines(before: Scrape, after: Scrape) -> Sequence[str]:
    bad = sum(
        count
        for labels, count in counter_growth(before, after, "pdproxy_requests_total").items()
        if dict(labels)["code"].startswith("5")
    )
    seconds = max(after.at - before.at, 1e-9)

    def per_second(name: str, **labels: str) -> str:
        number = counter_rate(before, after, f"pdproxy_{name}", **labels)
        return f"{number:,.0f}/s" if number >= 100 else f"{number:,.1f}/s"

    def now(name: str) -> str:
        return f"{after.total(f'pdproxy_{name}'):,.0f}"

    def took(name: str, share: float) -> str:
        return _format_seconds(histogram_quantile(before, after, f"pdproxy_{name}", share))

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
        f"{counter_rate(before, after, 'pdproxy_cpu_seconds_total'):.2f} cores",
        f"{now('connections')} connections",
        f"loop {1000 * after.total('pdproxy_loop_lag_seconds'):,.0f} ms late",
        f"memory {100 * after.total('pdproxy_memory_share'):.0f} %",
    )
    named = {
        "status": (_status_text(after),),
        "requests": requests,
        "tokens": tokens,
        "first token": latencies,
        "gateway": gateway,
    }
    return [f"{name:12} {', '.join(parts)}" for name, parts in named.items()]


_LEVELS: Final = ("healthy", "degraded", "impaired", "down")
"""Names of the states of a gateway, by value of pdproxy_status_state."""
_SHOWN_REASONS: Final = 5


def _status_text(scrape: Scrape) -> str:
    """Return the state of the gateway and its reasons, as `GET /admin/status` has them, without sentences."""
    level = int(scrape.total("pdproxy_status_state"))
    reasons = [dict(labels) for labels in scrape.by_labels("pdproxy_status_reason")]
    named = [f"{reason['code']} ({reason['subject']})" for reason in reasons]
    more = [f"{len(named) - _SHOWN_REASONS} more"] if len(named) > _SHOWN_REASONS else []
    state = _LEVELS[level] if 0 <= level < len(_LEVELS) else "unknown"
    return ", ".join([state, *named[:_SHOWN_REASONS], *more])


def _format_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _instance_rows(before: Scrape, after: Scrape) -> Sequence[InstanceRow]:
    misfits: dict[tuple[str, str], list[str]] = {}
    for labels in after.by_labels("pdproxy_instance_misfit"):
        named = dict(labels)
        misfits.setdefault((named["role"], named["address"]), []).append(named["kind"])
    pairs: dict[str, list[str]] = {}
    for labels in after.by_labels("pdproxy_status_reason"):
        reason = dict(labels)
        if reason["kind"] == "pair":
            prefiller, _, decoder = reason["subject"].partition(" ")
            pairs.setdefault(prefiller, []).append(f"{reason['code']} {decoder}")
            pairs.setdefault(decoder, []).append(f"{reason['code']} {prefiller}")
    rows = []
    for labels, state in after.by_labels("pdproxy_instance_state").items():
        its = dict(labels)
        name = (its["role"], its["address"])
        name_all = "pdproxy_instance_requests_total"
        requests = counter_rate(before, after, name_all, **its)
        rows.append(
            InstanceRow(
                *name,
                state=_STATES[int(state)] if 0 <= state < len(_STATES) else "unknown",
                in_flight=int(_value_of_metric(after, "pdproxy_instance_inflight", its)),
                kv_tokens=int(_value_of_metric(after, "pdproxy_instance_load_tokens", {**its, "kind": "kv"})),
                kv_capacity=None if (capacity := after.by_labels(_CAPACITY).get(labels)) is None else int(capacity),
                tokens_per_second=after.by_labels("pdproxy_instance_tokens_per_second").get(labels),
                requests_per_second=requests,
                failures_per_second=max(
                    0.0, requests - sum(counter_rate(before, after, name_all, **its, result=each) for each in _SERVED)
                ),
                pinned_kv=int(_value_of_metric(after, "pdproxy_instance_pinned_kv", its)),
                misfits=", ".join(sorted(misfits.get(name, ())) + sorted(pairs.get(its["address"], ()))),
            )
        )
    return sorted(rows, key=lambda row: (_ROLES.index(row.role) if row.role in _ROLES else len(_ROLES), row.address))


_CAPACITY: Final = "pdproxy_instance_kv_capacity_tokens"


def _value_of_metric(scrape: Scrape, name: str, labels: dict[str, str]) -> float:
    return scrape.by_labels(name).get(tuple(sorted(labels.items())), 0.0)


# One scrape of a gateway's /metrics.


Labels = tuple[tuple[str, str], ...]
"""Names and values of labels, in the order of names."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """All samples, by name and labels. `at`: seconds of the monotonic clock."""

    at: float
    samples: Mapping[str, Mapping[Labels, float]]

    @classmethod
    def of(cls, exposition: str, at: float) -> Scrape:
        """Read Prometheus' text format. Raises ValueError for other texts."""
        samples: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
        return cls(at, samples)

    def by_labels(self, name: str) -> Mapping[Labels, float]:
        """Return the samples of a metric; empty without such a metric."""
        return self.samples.get(name, {})

    def total(self, name: str) -> float:
        """Return the sum of a metric's samples in a scrape."""
        return sum(self.by_labels(name).values())


def counter_growth(before: Scrape, after: Scrape, name: str) -> dict[Labels, float]:
    """Return the growth of each counter of a metric. A counter that was reset has grown by its value."""
    old = before.by_labels(name)
    grown = {}
    for labels, value in after.by_labels(name).items():
        earlier = old.get(labels, 0.0)
        grown[labels] = value - earlier if value >= earlier else value
    return grown


def counter_rate(before: Scrape, after: Scrape, name: str, **wanted: str) -> float:
    """Return the growth per second of the counters of a metric with these labels."""
    grown = counter_growth(before, after, name)
    part = sum(value for labels, value in grown.items() if wanted.items() <= dict(labels).items())
    return part / max(after.at - before.at, 1e-9)


def histogram_quantile(before: Scrape, after: Scrape, name: str, share: float, **wanted: str) -> float | None:
    """Return a quantile of a histogram's values between two scrapes, in its unit; None without values.

    Only series with the labels in `wanted` count.

    `share`: 0.99 is the 99th percentile.
    """
    buckets: dict[float, float] = {}
    for labels, count in counter_growth(before, after, f"{name}_bucket").items():
        if not wanted.items() <= dict(labels).items():
            continue
        bound = float(dict(labels)["le"])
        buckets[bound] = buckets.get(bound, 0.0) + count
    bounds = sorted(buckets)
    return histograms.quantile(bounds, [buckets[bound] for bound in bounds], share)


# A view as plain text, and as a refreshing table for a terminal, which requires `rich`.


def view_as_text(shown: TopView) -> str:
    """Return lines for a terminal without control characters."""
    lines = [*shown.lines, "", *_align_columns([HEADINGS, *(row.cells() for row in shown.rows)])]
    if shown.keys:
        lines += ["", *_align_columns([KEY_HEADINGS, *shown.keys])]
    return "\n".join(lines)


def _align_columns(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in table]


def view_as_table(shown: TopView) -> RenderableType:
    """Return a table for a terminal. Raises ImportError without the extra `tui`."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(HEADINGS):
        is_number = 2 < number < len(HEADINGS) - 1
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=True)
    for row in shown.rows:
        style = "" if row.is_well else "yellow" if row.state == "up" else "bold red"
        table.add_row(*(Text(cell) for cell in row.cells()), style=style)
    lines = [Text(line, style=_line_style(line)) for line in shown.lines]
    if shown.help:
        lines.append(Text(shown.help, style="dim"))
    if not shown.keys:
        return Group(*lines, Text(), table)
    keys = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(KEY_HEADINGS):
        keys.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for cells in shown.keys:
        keys.add_row(*map(Text, cells))
    return Group(*lines, Text(), table, Text(), keys)


def _line_style(line: str) -> str:
    name, _, text = line.partition(" ")
    state = text.strip().partition(",")[0]
    return {"degraded": "yellow", "impaired": "bold red", "down": "bold red"}.get(state, "") if name == "status" else ""


# The sub-command: its flags, and the loop of scrapes and output.


_TIMEOUT_SECONDS: Final = 5.0
_DESCRIPTION: Final = """\
Show the activity of a running gateway: rates and latencies since the last scrape, and every instance. On a terminal the
table refreshes in place if the extra tui is installed. Otherwise it is printed again each time."""


class _MetricsPlace(NamedTuple):
    """The address of the metrics of a gateway."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    """Context of the connection; None: without TLS."""


class _MetricsUnavailable(Exception):
    """There are no metrics. The text is one sentence."""


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Show the table until interrupted; return the exit code, 1 if no gateway answers at first.

    Raises SettingsError.
    """
    flags, rest = _make_parser().parse_known_args(argv)
    place = _place_of_url(flags) if flags.url else _place_of_configuration(rest, environ)
    try:
        before: Scrape | None = _scrape_metrics(place)
    except _MetricsUnavailable as error:
        print(f"pdproxy: {error}", file=sys.stderr)
        return 1
    try:
        with ExitStack() as stack:
            show, has_keys = _make_view_printer(stack, is_once=flags.once)
            if not has_keys:
                while True:
                    time.sleep(flags.interval)
                    shown, before = _take_view(place, before)
                    show(shown)
                    if flags.once:
                        return 0
            _run_with_keys(stack.enter_context(Keyboard()), partial(_take_view, place), before, show, flags.interval)
    except KeyboardInterrupt:
        pass
    return 0


def _run_with_keys(
    keyboard: Keyboard,
    look: Callable[[Scrape | None], tuple[TopView, Scrape | None]],
    before: Scrape | None,
    show: Callable[[TopView], None],
    interval_seconds: float,
) -> None:
    """Show the view at each interval and after each key, until `q` is pressed."""
    controls, shown = ViewControls(), TopView((), ())
    due = time.monotonic() + interval_seconds
    while True:
        seconds = max(0.0, due - time.monotonic())
        key = keyboard.wait(seconds)
        if key == "q":
            return
        if key:
            controls = controls.pressed(key)
        elif time.monotonic() >= due:
            due = time.monotonic() + interval_seconds
            if not controls.is_paused:
                shown, before = look(before)
        show(controls.arranged(shown))


def _take_view(place: _MetricsPlace, before: Scrape | None) -> tuple[TopView, Scrape | None]:
    """Return the view and the scrape for the next comparison, or None if the gateway is away."""
    try:
        after = _scrape_metrics(place)
    except _MetricsUnavailable as error:
        return TopView((str(error),), ()), None
    return make_view(after if before is None else before, after), after


def _make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="pdproxy top",
        description=_DESCRIPTION,
        usage="pdproxy top [--url URL] [--interval SECONDS] [--once] [flags of pdproxy]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--url",
        metavar="URL",
        help="Address of the gateway's metrics, as http://host:port or https://host:port. Default: that of the "
        "configuration.",
    )
    add(
        "--interval",
        type=positive_number,
        default=2.0,
        metavar="SECONDS",
        help="Time between two scrapes, in seconds. Default: 2.",
    )
    add("--once", action="store_true", help="Print one table and exit.")
    add_tls_flags(parser)
    return parser


def _place_of_url(flags: argparse.Namespace) -> _MetricsPlace:
    """Return the place of the metrics that --url names. Raises SettingsError."""
    url = flags.url
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or port is None or parts.scheme not in ("http", "https"):
        raise SettingsError("--url must be http://host:port or https://host:port")
    return _MetricsPlace(host, port, make_tls_context(flags) if parts.scheme == "https" else None)


def _place_of_configuration(flags: Sequence[str], environ: Mapping[str, str]) -> _MetricsPlace:
    """Return the place of the metrics of a gateway with this configuration. Raises SettingsError."""
    settings = load_settings(flags, environ, needs_backends=False).settings
    port = settings.listen.port if settings.admin.port is None else settings.admin.port
    tls = blocking_http.local_tls(settings.has_tls(port))
    return _MetricsPlace(connectable_host(settings.administration_host), port, tls)


def _scrape_metrics(place: _MetricsPlace) -> Scrape:
    """Return one scrape of the gateway's metrics. Raises _MetricsUnavailable."""
    host, port, tls = place
    try:
        answer = blocking_http.get_blocking(host, port, "/metrics", _TIMEOUT_SECONDS, wants_body=True, tls=tls)
    except blocking_http.HttpRequestError as error:
        raise _MetricsUnavailable(f"{host} port {port} does not answer: {error}") from None
    if answer.status != 200:
        raise _MetricsUnavailable(
            f"{host} port {port} answered /metrics with status {answer.status}: it is not a gateway"
        )
    try:
        return Scrape.of(answer.body.decode(), time.monotonic())
    except ValueError:
        raise _MetricsUnavailable(f"{host} port {port} has no metrics at /metrics") from None


def _make_view_printer(stack: ExitStack, *, is_once: bool) -> tuple[Callable[[TopView], None], bool]:
    """Return the function that shows a view, and whether it shows it in place, so that keys can change it."""
    if is_once or not sys.stdout.isatty():
        return _print_view, False
    try:
        from rich.live import Live
    except ImportError:
        print("for a table that renews itself: pip install '.[tui]' in the checkout", file=sys.stderr)
        return _print_view, False
    live = stack.enter_context(Live(screen=True, auto_refresh=False))
    return lambda shown: live.update(view_as_table(shown), refresh=True), True


def _print_view(shown: TopView) -> None:
    print(view_as_text(shown), end="\n\n", flush=True)
