"""The sub-command `doctor`: flags, progress, report and exit code."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import sys
from functools import partial
from typing import TYPE_CHECKING, Final

from proxy import SERVER
from proxy.common import blocking_http
from proxy.observe import logs
from proxy.settings import Settings, connectable_host, load_settings
from proxy.settings.mistakes import Parser
from proxy.tools.doctor.examination import Examination, ExaminationOptions
from proxy.tools.doctor.findings import Finding, exit_code, findings_as_json, findings_as_table
from proxy.tools.doctor.gateway import GatewayHost, check_gateway
from proxy.tools.flag_numbers import positive_number, whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_WIDTH: Final = 120
_LOOK_SECONDS: Final = 2.0
_LEARNED: Final = re.compile(rb'^pdproxy_instance_knee\{address="([^"]*)"[^}]*\} (\S+)', re.MULTILINE)

_DESCRIPTION: Final = """\
Examine every configured instance and send one long test prompt through every pair of a prefill and a decode instance.
Report each problem and how to fix it. Also pass the flags with which the gateway is started. Instances that were added
at run time are not examined. A test prompt is a request like any other: if every request crashes an engine, it does,
too. --canaries 0 sends none."""
_EPILOG: Final = """\
The exit code is 0 without problems, 1 with warnings, and 2 with failures."""


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the doctor and return the exit code. Raises SettingsError."""
    flags, rest = _make_parser().parse_known_args(argv)
    loaded = load_settings(rest, environ)
    cores = os.cpu_count() or 1
    host = GatewayHost(
        loaded=loaded,
        is_gateway=partial(_is_gateway, loaded.settings),
        cores=cores,
        learned_limits=partial(_fetch_learned_limits, loaded.settings),
    )
    found = check_gateway(host)
    progress = ProgressLine()
    options = ExaminationOptions(
        canary_seconds=flags.canary_seconds, canary_tokens=flags.canary_tokens, canaries_per_pair=flags.canaries
    )
    examination = Examination(loaded, options, progress=progress.show)
    try:
        with logs.silence_log():  # the findings contain what a gateway would log
            found += asyncio.run(examination.run())
    finally:
        progress.clear()
    return print_findings(found, environ, is_json=flags.json)


def print_findings(found: Sequence[Finding], environ: Mapping[str, str], *, is_json: bool) -> int:
    """Print the findings and return the exit code."""
    if is_json:
        print(findings_as_json(found).decode())
    else:
        is_terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if is_terminal else _WIDTH
        print(findings_as_table(found, width, coloured=is_terminal and not environ.get("NO_COLOR")))
    return exit_code(found)


def _make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="pdproxy doctor",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        usage="pdproxy doctor [--json] [--canaries N] [flags of pdproxy]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--json", action="store_true", help="Print JSON instead of a table.")
    add(
        "--canaries",
        type=whole_number,
        default=1,
        metavar="N",
        help="Number of test prompts for each pair. 0 sends none. Default: 1.",
    )
    add(
        "--canary-tokens",
        type=whole_number,
        default=2048,
        metavar="N",
        help="Approximate length of a test prompt, in tokens. Default: 2048.",
    )
    add(
        "--canary-seconds",
        type=positive_number,
        default=60.0,
        metavar="N",
        help="Time limit for the answer to a test prompt, in seconds. Default: 60.",
    )
    return parser


class ProgressLine:
    """Progress line on standard error, shown only on a terminal."""

    def __init__(self) -> None:
        self._width = 0

    def show(self, noun: str, done: int, total: int) -> None:
        """Show how many of all checks are done."""
        if sys.stderr.isatty():
            line = f"{noun}: {done} of {total}"
            print(f"\r{line:{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(line)

    def clear(self) -> None:
        """Remove the progress line from the terminal."""
        if self._width:
            print(f"\r{'':{self._width}}\r", end="", file=sys.stderr, flush=True)


def _is_gateway(settings: Settings, host: str, port: int) -> bool:
    """Return whether a pdproxy gateway answers at this address."""
    try:
        tls = blocking_http.local_tls(settings.has_tls(port))
        return (
            blocking_http.get_blocking(connectable_host(host), port, "/livez", _LOOK_SECONDS, tls=tls).server == SERVER
        )
    except blocking_http.HttpRequestError:
        return False


def _fetch_learned_limits(settings: Settings, host: str, port: int) -> dict[str, int]:
    """Return the request limits that a running gateway has learned, by instance address; empty if unavailable."""
    try:
        tls = blocking_http.local_tls(settings.has_tls(port))
        page = blocking_http.get_blocking(
            connectable_host(host), port, "/metrics", _LOOK_SECONDS, wants_body=True, tls=tls
        ).body
    except blocking_http.HttpRequestError:
        return {}
    return {match[1].decode(): int(float(match[2])) for match in _LEARNED.finditer(page)}
