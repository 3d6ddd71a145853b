"""Checks of the gateway's own host and configuration."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.common.terms import format_count
from proxy.process.supervisor.listening import PortInUse, create_listener
from proxy.process.worker.process import describe_shortages
from proxy.tools.doctor.findings import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from proxy.settings import LoadedSettings

_SUBJECT: Final = "gateway"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayHost:
    """Input of the checks. `is_gateway` returns whether a pdproxy gateway answers at a host and port."""

    loaded: LoadedSettings
    is_gateway: Callable[[str, int], bool]
    cores: int
    learned_limits: Callable[[str, int], Mapping[str, int]] = lambda host, port: {}
    """Returns the request limits that the gateway at a host and port has learned, by instance address."""


def check_gateway(host: GatewayHost) -> list[Finding]:
    """Return the findings of all checks in this group."""
    found = [finding for check in GATEWAY_CHECKS for finding in check(host)]
    if not any(finding.severity > Severity.NOTE for finding in found):
        settings = host.loaded.settings
        workers = format_count(settings.workers, "worker")
        words = f"connector {settings.connector}, {settings.fleet}, {workers}, configuration is valid"
        found.insert(0, Finding(Severity.OK, "configuration", _SUBJECT, words))
    return found


def check_warnings(host: GatewayHost) -> Iterator[Finding]:
    """Check for misspelt options in the environment and on the command line."""
    for warning in host.loaded.warnings:
        hint = "remove it, or correct the spelling"
        yield Finding.of_text(Severity.WARNING, "environment", _SUBJECT, warning, hint)


def check_access_restrictions(host: GatewayHost) -> Iterator[Finding]:
    """Check that client and administration access is restricted."""
    for text in host.loaded.settings.access_warnings:
        severity = Severity.NOTE if text.startswith("administration is closed") else Severity.WARNING
        yield Finding.of_text(severity, "keys", _SUBJECT, text)


def check_key_files(host: GatewayHost) -> Iterator[Finding]:
    """Check that other users of this host cannot read the key files."""
    settings = host.loaded.settings
    auth = settings.auth
    for option, path in (
        ("auth.engine_api_key_file", auth.engine_api_key_file),
        ("auth.admin_key_file", auth.admin_key_file),
        ("auth.client_keys_file", auth.client_keys_file),
        ("listen.tls_key", settings.listen.tls_key),
        ("admin.tls_key", settings.admin.tls_key),
        ("engines.client_key", settings.engines.client_key),
    ):
        if path is not None and _is_readable_by_all(path):
            words = f"every user of this host can read {option} {path}"
            yield Finding(Severity.WARNING, "keys", _SUBJECT, words, f"chmod o-rwx {path}")


def check_keys_differ(host: GatewayHost) -> Iterator[Finding]:
    """Check that the admin key differs from the engine key."""
    auth = host.loaded.settings.auth
    if auth.admin_key is not None and auth.admin_key == auth.engine_api_key:
        words = "auth.admin_key equals the engine key, which engines and their logs may expose"
        yield Finding(Severity.WARNING, "keys", _SUBJECT, words, "generate another key: openssl rand -hex 32")


def check_ports(host: GatewayHost) -> Iterator[Finding]:
    """Check that the ports are free or belong to a running gateway."""
    settings = host.loaded.settings
    for option, name, port in (
        ("listen.port", settings.listen.host, settings.listen.port),
        ("admin.port", settings.admin.host, settings.admin.port),
        ("admin.probe_port", settings.admin.host, settings.admin.probe_port),
    ):
        if not port:
            continue
        try:
            create_listener(name, port).close()
        except PortInUse as error:
            if option != "admin.probe_port" and host.is_gateway(name, port):
                words = f"a gateway listens on {option} {port}"
                yield Finding(
                    Severity.NOTE, "port", _SUBJECT, words, "the doctor does not examine the state of a running gateway"
                )
                for address, most in host.learned_limits(name, port).items():
                    words = f"the gateway has learned a limit for {address}: at most {most} requests at a time"
                    hint = "further requests are queued; balance.decode_policy: least_tokens has no such limit"
                    yield Finding(Severity.NOTE, "learned", f"decode {address}", words, hint)
            else:
                hint = f"`ss -ltnp 'sport = :{port}'` names the program; stop it, or choose another {option}"
                yield Finding(Severity.FAILURE, "port", _SUBJECT, str(error), hint)
        except OSError as error:
            hint = f"use a free port and an address of this host for {option}; ports below 1024 require a privilege"
            yield Finding(Severity.FAILURE, "port", _SUBJECT, str(error), hint)


def check_fds(host: GatewayHost) -> Iterator[Finding]:
    """Check that there are enough file descriptors for the clients."""
    for shortage in describe_shortages(host.loaded.settings):
        yield Finding.of_text(Severity.WARNING, "fds", _SUBJECT, shortage)


def check_workers(host: GatewayHost) -> Iterator[Finding]:
    """Check that this host has a core for each worker."""
    workers = host.loaded.settings.workers
    if workers > host.cores:
        words = f"{format_count(workers, 'worker')} share {format_count(host.cores, 'core')}"
        hint = "set workers to the number of cores or to auto: additional workers only compete for them"
        yield Finding(Severity.WARNING, "workers", _SUBJECT, words, hint)


GATEWAY_CHECKS: Final[tuple[Callable[[GatewayHost], Iterable[Finding]], ...]] = (
    check_warnings,
    check_access_restrictions,
    check_key_files,
    check_keys_differ,
    check_ports,
    check_fds,
    check_workers,
)


def _is_readable_by_all(path: Path) -> bool:
    try:
        return bool(os.stat(path).st_mode & stat.S_IROTH)
    except OSError:
        return False
