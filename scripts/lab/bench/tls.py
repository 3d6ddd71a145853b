"""CPU time of TLS: pdproxy with a certificate, beside pdproxy without one and nginx in front of it.

All programs run on one core, and cheap engines and clients on another. Each round sends the same requests to all
programs in turn. nginx is counted alone: its figure is the price of TLS in another process.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Final

import trustme
import uvloop

from lab.bench.load import problem
from lab.bench.scenarios import PACED_20_MS, SHORT_STREAM, Scenario, named
from lab.common.fleet import Fleet
from lab.common.load import CHAT, connect, post
from lab.common.output import aligned
from lab.common.peers import ours
from lab.common.proc import cpu_seconds
from lab.common.processes import HOST, Program, quiet_ports

PLAIN: Final = "pdproxy"
SECURED: Final = "pdproxy with TLS"
NGINX: Final = "nginx alone"
_NGINX_CONFIGURATION: Final = """\
daemon off;
master_process off;
pid {directory}/nginx.pid;
error_log {directory}/nginx.log;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {directory}/nginx-bodies;
  upstream gateway {{ server {host}:{gateway}; keepalive 512; }}
  server {{
    listen {host}:{port} ssl;
    ssl_certificate {certificate};
    ssl_certificate_key {key};
    location / {{
      proxy_pass http://gateway;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""


@dataclass(frozen=True, slots=True)
class _Load:
    title: str
    unit: str
    scenario: Scenario
    clients: int
    requests: int
    """Requests of each client."""
    keeps_connections: bool = True

    @property
    def units(self) -> int:
        """Number of requests or tokens of a round."""
        return self.clients * self.requests * self.scenario.max_tokens


_LOADS: Final = (
    _Load("1-token streams, connections kept", "µs a request", named(SHORT_STREAM), 32, 100),
    _Load("1-token streams, a connection each", "µs a request", named(SHORT_STREAM), 32, 30, keeps_connections=False),
    _Load("64-token streams, 20 ms a token", "µs a token", named(PACED_20_MS), 200, 1),
)


@dataclass(frozen=True, slots=True)
class _Target:
    program: Program
    context: ssl.SSLContext | None
    """None: without TLS."""


def compare_tls(rounds: int, package: Path | None) -> None:
    """Measure all programs and print the table. `package`: directory of the gateway, or None for the project's."""
    if (nginx := shutil.which("nginx")) is None:
        sys.exit("--tls: nginx is not on the PATH (Debian: apt-get install nginx-light)")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("--tls needs two cores: one for the programs, one for the engines and the clients")
    os.sched_setaffinity(0, cores[1:])
    pinned = ("taskset", "-c", str(cores[0]))
    with ExitStack() as stack:
        targets = _start(stack, pinned, package, nginx)
        figures = uvloop.run(_measured(targets, rounds))
    print(f"CPU time, medians of {rounds} rounds (middle half of the ratios).\n")
    print(aligned([("", "", *targets, f"{SECURED} / {PLAIN}"), *(_row(load, figures[load]) for load in _LOADS)]))


def _start(stack: ExitStack, pinned: Sequence[str], package: Path | None, nginx: str) -> Mapping[str, _Target]:
    """Start the programs, which end with the stack."""
    fleet = stack.enter_context(Fleet())
    certificate, key, context = _certificate(fleet.directory)
    fleet.cheap_engines(2, 2)
    words = (*pinned, *ours(package).words)
    plain = fleet.keep(fleet.gateway(words=words))
    pair = {"PROXY_LISTEN__TLS_CERTIFICATE": str(certificate), "PROXY_LISTEN__TLS_KEY": str(key)}
    secured = fleet.gateway(words=words, environment=pair)
    secured.ready_path = ""  # it is ready when it accepts connections
    fleet.keep(secured)
    (port,) = quiet_ports(1)
    file = fleet.directory / "nginx.conf"
    paths = {"directory": fleet.directory, "certificate": certificate, "key": key}
    file.write_text(_NGINX_CONFIGURATION.format(host=HOST, gateway=plain.port, port=port, **paths))
    command = (*pinned, nginx, "-c", str(file), "-e", str(fleet.directory / "nginx.log"))
    proxy = fleet.keep(Program(name=NGINX, command=command, port=port, output=fleet.directory / "nginx.out"))
    return {PLAIN: _Target(plain, None), SECURED: _Target(secured, context), NGINX: _Target(proxy, context)}


def _certificate(directory: Path) -> tuple[Path, Path, ssl.SSLContext]:
    """Write a certificate for the loopback address; return it, its key and a client's context that trusts it."""
    authority = trustme.CA()
    issued = authority.issue_cert(HOST)
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    key.chmod(0o600)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return certificate, key, context


async def _measured(targets: Mapping[str, _Target], rounds: int) -> Mapping[_Load, Mapping[str, Sequence[float]]]:
    """Return µs per request or token in each round, by load and program."""
    figures: dict[_Load, dict[str, list[float]]] = {load: {name: [] for name in targets} for load in _LOADS}
    for number in range(rounds + 1):
        for load in _LOADS:
            for name, target in targets.items():
                before = cpu_seconds(target.program.pid)
                await asyncio.gather(*(_client(load, target) for _ in range(load.clients)))
                if number:  # the first round warms up
                    figures[load][name].append(1e6 * (cpu_seconds(target.program.pid) - before) / load.units)
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return figures


async def _client(load: _Load, target: _Target) -> None:
    """Send a client's requests. Exits at the first wrong answer."""
    port = target.program.port
    request = post(port, load.scenario.body(), CHAT)
    client = await connect(port, tls=target.context)
    for number in range(load.requests):
        if number and not load.keeps_connections:
            client.transport.close()
            client = await connect(port, tls=target.context)
        if wrong := problem(load.scenario, await client.ask(request)):
            sys.exit(f"{target.program.name}: {wrong}")
    client.transport.close()


def _row(load: _Load, figures: Mapping[str, Sequence[float]]) -> tuple[str, ...]:
    ratios = [own / base for own, base in zip(figures[SECURED], figures[PLAIN], strict=True)]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    cells = (f"{median(values):.1f}" for values in figures.values())
    return load.title, load.unit, *cells, f"{median(ratios):.2f} ({low:.2f} to {high:.2f})"
