"""The sub-command: its flags, signals, and the hook that restarts an instance."""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from proxy.common.backend import Role
from proxy.common.terms import format_count
from proxy.settings import SettingsError
from proxy.settings.kinds import check_header_value
from proxy.settings.mistakes import Parser
from proxy.settings.sources import read_key_file
from proxy.tools.flag_numbers import duration_seconds, whole_number
from proxy.tools.gateway_tls import add_tls_flags, make_tls_context
from proxy.tools.roll.gateways import GatewayGroup, GatewayProblem, RollInstance
from proxy.tools.roll.walk import FleetWalk, RestartWalk, RoleWalk, RollLimits, RollProgress, RollStopped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType


_DESCRIPTION: Final = """\
Restart the instances of a role one after the other while the gateways serve. pdproxy disables an instance, and its
requests end or move to other instances. Then the hook restarts it, and pdproxy continues when it serves again. The roll
stops if too few others serve, or if requests of clients fail. Press Ctrl-C to stop after the present instance, and
again to stop at once. Run the same command to resume. With --to-role, pdproxy moves elastic instances to another role
instead of restarting them."""
_PLACEHOLDERS: Final = ("address", "host", "port", "role")
_KEY_VARIABLE: Final = "PROXY_AUTH__ADMIN_KEY"


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the sub-command and return its exit code. Raises SettingsError.

    0: all were restarted; 1: the roll stopped earlier.
    """
    flags = read_flags(argv)
    what = flags.role if flags.to_role is None else f"{flags.role}-to-{flags.to_role}"
    path = Path(flags.state or f"pdproxy-roll-{what}.json")
    began = time.strftime("%Y-%m-%d %H:%M:%S")
    progress = RollProgress(path, what, began) if flags.anew else RollProgress.resumed(path, what, began)
    urls = flags.url or ["http://127.0.0.1:1999"]
    key, tls = _read_key(flags.admin_key_file, environ), make_tls_context(flags)
    gateways = GatewayGroup(urls, flags.role, key, tls)
    if flags.anew and not flags.dry_run:
        progress.forget()
    limits = RollLimits(
        min_serving=flags.min_serving,
        max_failures=flags.max_failures,
        evacuate_after_seconds=flags.evacuate_after,
        drain_seconds=flags.drain_seconds,
        ready_seconds=flags.ready_seconds,
        settle_seconds=flags.settle_seconds,
    )
    tell = partial(print, flush=True)
    if flags.to_role is None:
        restart = _restart_by_hand if flags.hook is None else partial(_restart_by_hook, flags.hook, flags.role)
        walk: FleetWalk = RestartWalk(gateways, progress, limits, restart, tell)
    else:
        walk = RoleWalk(gateways, GatewayGroup(urls, flags.to_role, key, tls), progress, limits, tell)
    try:
        if progress.is_begun:
            print(f"resuming the roll of {progress.began}; --anew starts a new one")
        planned = walk.plan(flags.instance)
        if flags.dry_run:
            return _print_plan(planned, walk, gateways, flags)
        before = signal.signal(signal.SIGINT, partial(_on_interrupt, walk))
        try:
            walk.run(planned)
        finally:
            signal.signal(signal.SIGINT, before)
        failed = format_count(gateways.failures(), "request")
        done = "are restarted" if flags.to_role is None else f"serve as {flags.to_role}"
        print(f"all {len(planned)} {done}; clients have seen {failed} fail meanwhile")
        return 0
    except (RollStopped, GatewayProblem) as error:
        return _print_end(str(error), progress, is_move=flags.to_role is not None)
    except KeyboardInterrupt:
        return _print_end("left at once", progress, is_move=flags.to_role is not None)


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Read the flags of the sub-command. Raises SettingsError."""
    parser = Parser(prog="pdproxy roll", description=_DESCRIPTION, allow_abbrev=False)
    add = parser.add_argument
    add("--role", required=True, choices=["prefill", "decode", "encode"], help="Role of the instances to restart.")
    add(
        "--to-role",
        choices=["prefill", "decode"],
        help="Move elastic instances to this role instead of restarting them. They keep it until you change it.",
    )
    add(
        "--url",
        action="append",
        type=_parse_url,
        help="URL of the administration of a gateway. Give all gateways that share the engines. Repeatable. Default: "
        "http://127.0.0.1:1999. Give it if the gateway has an admin.port.",
    )
    add(
        "--hook",
        type=_parse_hook,
        metavar="COMMAND",
        help="Line for sh that restarts one instance, with {host}, {port}, {address} and {role}. It must return after "
        "the old process has ended. Default: pdproxy asks you to restart each instance.",
    )
    add("--instance", action="append", default=[], metavar="HOST:PORT", help="Restart only this instance. Repeatable.")
    add(
        "--evacuate-after",
        type=duration_seconds,
        metavar="SECONDS",
        help="Time after which the running requests of an instance move to other instances, in seconds. 0 moves them "
        "at once. Default: leaving.evacuate_after_seconds of the gateways, and elastic.evacuate_after_seconds with "
        "--to-role.",
    )
    add(
        "--min-serving",
        type=whole_number,
        metavar="N",
        help="Minimum number of other instances that serve during a restart. Default: all that serve at the start, or "
        "all that stay with --to-role.",
    )
    add(
        "--max-failures",
        type=whole_number,
        default=0,
        metavar="N",
        help="Maximum number of failed requests of clients before the roll stops. Default: 0.",
    )
    add(
        "--drain-seconds",
        type=duration_seconds,
        default=3600.0,
        metavar="SECONDS",
        help="Maximum time until the requests of an instance have ended, in seconds. Default: 3600.",
    )
    add(
        "--ready-seconds",
        type=duration_seconds,
        default=1800.0,
        metavar="SECONDS",
        help="Maximum time until a restarted instance serves, in seconds. Default: 1800.",
    )
    add(
        "--settle-seconds",
        type=duration_seconds,
        default=10.0,
        metavar="SECONDS",
        help="Time between two instances, in seconds. Default: 10.",
    )
    add("--state", metavar="FILE", help="File that keeps the progress. Default: pdproxy-roll-ROLE.json.")
    add("--anew", action="store_true", help="Start a new roll, and ignore the progress in the file.")
    add(
        "--admin-key-file",
        metavar="FILE",
        help="File with the admin key. Default: the environment variable PROXY_AUTH__ADMIN_KEY.",
    )
    add("--dry-run", action="store_true", help="Print the steps, and do nothing.")
    add_tls_flags(parser)
    return _check_flags(parser.parse_args(argv))


def _check_flags(flags: argparse.Namespace) -> argparse.Namespace:
    """Return the flags. Raises SettingsError if they contradict each other."""
    if flags.to_role is not None and (flags.role not in ("prefill", "decode") or flags.role == flags.to_role):
        raise SettingsError(f"--to-role {flags.to_role} needs --role {Role(flags.to_role).counterpart}")
    if flags.to_role is not None and flags.hook is not None:
        raise SettingsError("--hook restarts instances, and --to-role moves them without a restart")
    return flags


# Flags


def _parse_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_place = parts.hostname is not None and parts.port != 0 and "@" not in parts.netloc
    except ValueError:  # no port, or no IPv6 address
        is_place = False
    if not is_place or parts.scheme not in ("http", "https") or parts.path.rstrip("/"):
        raise argparse.ArgumentTypeError(
            "must be http://host:port or https://host:port"
        )  # the URL may contain a password
    return text


def _parse_hook(text: str) -> str:
    try:
        _fill_hook(text, "decode", "host:1")
    except (AttributeError, LookupError, ValueError):
        names = ", ".join(f"{{{name}}}" for name in _PLACEHOLDERS)
        raise argparse.ArgumentTypeError(f"knows {names}; braces of the shell are written twice") from None
    return text


def _read_key(path: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the key. Raises SettingsError, without the key."""
    if path is None:
        what, key = _KEY_VARIABLE, environ.get(_KEY_VARIABLE, "")
    else:
        what, key = "--admin-key-file", read_key_file("--admin-key-file", Path(path))
    try:
        check_header_value(key)
    except ValueError as problem:
        raise SettingsError(f"{what} {problem}") from None
    return key or None


# Restarts


def _fill_hook(hook: str, role: str, address: str) -> str:
    host, _, port = address.rpartition(":")
    values = {"address": address, "host": host.strip("[]"), "port": port, "role": role}
    return hook.format(**{name: shlex.quote(value) for name, value in values.items()})


def _restart_by_hook(hook: str, role: str, address: str) -> None:
    """Run the hook in a new session, because Ctrl-C is for the roll, which ends when the instance is back."""
    line = _fill_hook(hook, role, address)
    code = subprocess.run(["/bin/sh", "-c", line], start_new_session=True, check=False).returncode
    if code != 0:
        raise RollStopped(f"the hook of {address} ended with code {code}")


def _restart_by_hand(address: str) -> None:
    print(f"  restart {address} now, and press Enter when the old process has ended: ", end="", flush=True)
    if not sys.stdin.readline():
        raise RollStopped("no hook is configured, and there is no terminal to ask")


# Output


def _on_interrupt(walk: FleetWalk, number: int, frame: FrameType | None) -> None:
    print("\nstopping when no instance is out of service; another Ctrl-C stops at once", flush=True)
    walk.stop()
    signal.signal(number, signal.default_int_handler)


def _print_plan(
    planned: Sequence[RollInstance], walk: FleetWalk, gateways: GatewayGroup, flags: argparse.Namespace
) -> int:
    others = format_count(walk.min_serving, "other instance")
    if isinstance(walk, RoleWalk):
        print(f"{format_count(len(planned), f'{flags.role} instance')} to {flags.to_role}, one at a time:")
        for instance in planned:
            print("\n    ".join([f"  {instance.address}", *walk.steps(instance.address)]))
        return 0
    print(f"{format_count(len(planned), f'{flags.role} instance')}, one at a time, with at least {others} serving:")
    for instance in planned:
        how = "by hand" if flags.hook is None else _fill_hook(flags.hook, flags.role, instance.address)
        print(f"  {instance.address}  {instance.inflight} in flight now; restarted: {how}")
        for warning in gateways.disable(instance.address, flags.evacuate_after, is_dry_run=True):
            print(f"    {warning}")
    return 0


def _print_end(why: str, progress: RollProgress, *, is_move: bool) -> int:
    print(f"pdproxy roll: {why}", file=sys.stderr)
    if progress.current is not None:
        state = "may still be moving" if is_move else "is away, and may still be disabled"
        print(f"{progress.current} {state}", file=sys.stderr)
    done = f"{'moved' if is_move else 'restarted'} so far: {format_count(len(progress.done), 'instance')}"
    print(f"{done}; run the command again to resume", file=sys.stderr)
    return 1
