"""The sub-command: its flags, and the loop of scrapes and output."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from proxy.common import blocking_http
from proxy.settings import SettingsError, load, reachable
from proxy.settings.cli import Parser
from proxy.tools.flag_numbers import positive
from proxy.tools.top.view import Scrape, View, as_table, as_text, view

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_TIMEOUT_SECONDS: Final = 5.0
_DESCRIPTION: Final = """\
Show what a running gateway does: its rates and latencies since the last look, and every instance. On a terminal the
table renews itself, with pdproxy[tui] installed; otherwise it is printed again and again."""


class _NoMetrics(Exception):
    """There are no metrics. The text is one sentence."""


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Show the table until interrupted; return the exit code, 1 if no gateway answers at first.

    Raises SettingsError.
    """
    flags, rest = _parser().parse_known_args(argv)
    host, port = _place(flags.url) if flags.url else _configured(rest, environ)
    try:
        before: Scrape | None = _scrape(host, port)
    except _NoMetrics as error:
        print(f"pdproxy: {error}", file=sys.stderr)
        return 1
    try:
        with ExitStack() as stack:
            show = _shower(stack, is_once=flags.once)
            while True:
                time.sleep(flags.interval)
                shown, before = _look(host, port, before)
                show(shown)
                if flags.once:
                    return 0
    except KeyboardInterrupt:
        return 0


def _look(host: str, port: int, before: Scrape | None) -> tuple[View, Scrape | None]:
    """Return the view and the scrape for the next comparison, or None if the gateway is away."""
    try:
        after = _scrape(host, port)
    except _NoMetrics as error:
        return View((str(error),), ()), None
    return view(after if before is None else before, after), after


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="pdproxy top",
        description=_DESCRIPTION,
        usage="pdproxy top [--url URL] [--interval SECONDS] [--once] [flags of pdproxy]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--url", metavar="URL", help="http://host:port of its metrics; by default what the flags of pdproxy say")
    add("--interval", type=positive, default=2.0, metavar="SECONDS", help="between two looks (2)")
    add("--once", action="store_true", help="print one table and leave")
    return parser


def _place(url: str) -> tuple[str, int]:
    """Return the URL of the metrics. Raises SettingsError."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or port is None or parts.scheme != "http":
        raise SettingsError("--url must be http://host:port")
    return host, port


def _configured(flags: Sequence[str], environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the URL of the metrics of a gateway with this configuration. Raises SettingsError."""
    settings = load(flags, environ, needs_backends=False).settings
    port = settings.listen.port if settings.admin.port is None else settings.admin.port
    return reachable(settings.administration_host), port


def _scrape(host: str, port: int) -> Scrape:
    """Return one scrape. Raises _NoMetrics."""
    try:
        answer = blocking_http.get(host, port, "/metrics", _TIMEOUT_SECONDS, wants_body=True)
    except blocking_http.HttpRequestError as error:
        raise _NoMetrics(f"{host} port {port} does not answer: {error}") from None
    if answer.status != 200:
        raise _NoMetrics(f"{host} port {port} answered /metrics with status {answer.status}: it is no gateway's")
    try:
        return Scrape.of(answer.body.decode(), time.monotonic())
    except ValueError:
        raise _NoMetrics(f"{host} port {port} does not tell metrics at /metrics") from None


def _shower(stack: ExitStack, *, is_once: bool) -> Callable[[View], None]:
    """Return the function that shows a view: in place on a terminal, and below the last one otherwise."""
    if is_once or not sys.stdout.isatty():
        return _print
    try:
        from rich.live import Live
    except ImportError:
        print("for a table that renews itself: pip install 'pdproxy[tui]'", file=sys.stderr)
        return _print
    live = stack.enter_context(Live(screen=True, auto_refresh=False))
    return lambda shown: live.update(as_table(shown), refresh=True)


def _print(shown: View) -> None:
    print(as_text(shown), end="\n\n", flush=True)
