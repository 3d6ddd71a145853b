"""Instances come and go in the zone of a real name server, which is also killed, while clients are served.

Where the kernel allows it, all of this is in a network of its own: the gateway then finds the server by an
/etc/resolv.conf, on port 53, and names by its search list. Otherwise the server has a port on loopback.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.common.fleet import Fleet, Gateway
from lab.common.load import Connections, Load, post
from lab.common.processes import Program, fetch, quiet_ports, unwind_on_signals

ZONE = "fleet.test"

_CONFIGURATION = """\
server:
    rundir: "{directory}"
    listen: [ {address}@{port} ]
database:
    storage: "{directory}/db"
log:
  - target: stderr
    any: warning
zone:
  - domain: {zone}
    storage: "{directory}"
    file: "zone"
    zonefile-load: whole
    journal-content: none
"""
_OWN_NETWORK = "--in-own-network"
_CLIENTS = 6
_DECODERS = 4
_FOLLOWED_SECONDS = 20.0
_PREFILLERS = ("127.0.0.2", "127.0.0.3")
_QUESTION = {
    "model": "sim",
    "messages": [{"role": "user", "content": "Who is there?"}],
    "stream": True,
    "max_tokens": 30,
}
# Nobody is to ask them, but an answer that names them does not fit into a datagram.
_SPARE = [f"_http._tcp.decode SRV 20 0 7100 spare-{number}.of-a-rather-long-name" for number in range(60)]


class Knot(Program):
    """A real name server with one zone, which is rewritten. The zone is empty at first."""

    def __init__(self, directory: Path, port: int) -> None:
        file = directory / "knot.conf"
        file.write_text(_CONFIGURATION.format(directory=directory, address="127.0.0.1", port=port, zone=ZONE))
        command = ["knotd", "--config", str(file)]
        super().__init__(name="knotd", command=command, port=port, output=directory / "knot.log")
        self._zone = directory / "zone"
        self._serial = 0
        self.say(())

    def say(self, records: Sequence[str]) -> None:
        """The zone is this from now on: lines of a zone file. They count as soon as the server is there."""
        self._serial += 1
        head = [
            "$TTL 1",
            f"@ SOA ns.{ZONE}. admin.{ZONE}. {self._serial} 60 60 60 1",
            f"@ NS ns.{ZONE}.",
            "ns A 127.0.0.1",
        ]
        new = self._zone.with_suffix(".new")
        new.write_text("\n".join([*head, *records, ""]))
        new.replace(self._zone)
        self.send(signal.SIGHUP)


def _instances(gateway: Gateway) -> tuple[set[str], set[str]]:
    """The addresses of those that serve, and what is wrong with sources."""
    told = json.loads(fetch(gateway.url + "/instances"))
    serving = {one["address"] for one in told["instances"] if (one["membership"], one["state"]) == ("enabled", "up")}
    return serving, {source["problem"] for source in told["sources"] if source["problem"]}


@dataclass
class Zone:
    """What there is to be, and what the gateway makes of it."""

    knot: Knot
    gateway: Gateway
    load: Load
    prefill_port: int
    decode_host: str

    def say(self, prefillers: Sequence[str], decoders: Sequence[int], *more: str) -> set[str]:
        """The addresses of those that serve as soon as the gateway knows of it."""
        self.knot.say(
            [
                *(f"prefill A {address}" for address in prefillers),
                *(f"_http._tcp.decode SRV 10 0 {port} {self.decode_host}." for port in decoders),
                "here A 127.0.0.1",
                *more,
            ]
        )
        return {
            *(f"{address}:{self.prefill_port}" for address in prefillers),
            *(f"{self.decode_host}:{port}" for port in decoders),
        }

    async def serves(self, what: str, expected: set[str], *, has_problem: bool = False) -> str:
        """Wait until these do, and all sources have a problem or none has; the problem then."""
        serving: set[str] = set()
        problems: set[str] = set()
        try:
            async with asyncio.timeout(_FOLLOWED_SECONDS):
                while serving != expected or bool(problems) != has_problem:
                    await asyncio.sleep(0.1)
                    serving, problems = await asyncio.to_thread(_instances, self.gateway)
        except TimeoutError:
            sys.exit(f"{what}: {expected} were expected, and there are {serving}; {problems} {self.load.problems[:3]}")
        return next(iter(problems), "")

    async def becomes(self, what: str, expected: set[str], *, has_problem: bool = False) -> None:
        """The same, and then some more must be served."""
        problem = await self.serves(what, expected, has_problem=has_problem)
        await self.load.have_ended(2 * _CLIENTS)
        print(f"{what}: {len(expected)} serve" + (f" ({problem})" if problem else ""), flush=True)


def _started(fleet: Fleet, is_isolated: bool) -> tuple[Knot, Gateway]:
    """Start engines, the name server, and the gateway that has names alone."""
    (prefill_port,) = quiet_ports(1)
    for address in _PREFILLERS:
        fleet.mock_engine("prefill", "--model", "sim", host=address, port=prefill_port)
    for _ in range(_DECODERS):
        fleet.mock_engine("decode", "--model", "sim", "--decode-step-ms", "5")
    server_port = 53 if is_isolated else quiet_ports(1)[0]
    knot = fleet.keep(Knot(fleet.directory, server_port))
    names = {"PREFILL": f"prefill:{prefill_port}", "DECODE": "_http._tcp.decode"}
    environ = {"PROXY_HEALTH__CHANGING_INTERVAL_SECONDS": "0.2", "PROXY_DISCOVERY__DNS_MIN_SECONDS": "0.2"}
    if not is_isolated:
        names = {"PREFILL": f"prefill.{ZONE}:{prefill_port}", "DECODE": f"_http._tcp.decode.{ZONE}"}
        environ["PROXY_DISCOVERY__DNS_SERVERS"] = f"127.0.0.1:{server_port}"
    environ |= {f"PROXY_DISCOVERY__{role}_DNS": name for role, name in names.items()}
    gateway = fleet.gateway(environment=environ, finds_engines=True)
    gateway.ready_path = ""  # it is ready once the zone has engines
    return knot, fleet.keep(gateway)


async def _run(fleet: Fleet, *, is_isolated: bool) -> int:
    knot, gateway = _started(fleet, is_isolated)
    decoders = fleet.decode
    connections, question = Connections(gateway.port), post(gateway.port, _QUESTION)

    async def ask(_: int) -> str:
        return (await connections.ask(question)).problem()

    load = Load(ask)
    # What SRV records name is looked up by the system, which asks this server in its own network only.
    zone = Zone(knot, gateway, load, fleet.prefill[0], f"here.{ZONE}" if is_isolated else "localhost")
    expected = zone.say(_PREFILLERS, decoders)
    await zone.serves("at first", expected)
    async with load.at_a_time(_CLIENTS):
        await zone.becomes("what the zone has", expected)
        await zone.becomes("a prefiller and two decoders less", zone.say(_PREFILLERS[:1], decoders[2:]))
        await zone.becomes(
            "all, in an answer for which a datagram is too small",
            expected := zone.say(_PREFILLERS, decoders, *_SPARE),
        )
        knot.say(())
        await zone.becomes("the names are gone", expected, has_problem=True)
        await zone.becomes("they are back, with two decoders", expected := zone.say(_PREFILLERS, decoders[:2]))
        await asyncio.to_thread(knot.end, signal.SIGKILL)
        await zone.becomes("the name server is killed", expected, has_problem=True)
        expected = zone.say(_PREFILLERS[1:], decoders[1:])
        await asyncio.to_thread(knot.restart)
        await zone.becomes("it is back, with others", expected)
    print(f"{load.ended} requests, {len(load.problems)} failures {load.problems[:3] or ''}")
    return int(bool(load.problems))


def main() -> None:
    """Run it, in a network of its own if that can be had."""
    unwind_on_signals()
    is_isolated = _OWN_NETWORK in sys.argv
    unshare = ["unshare", "--map-root-user", "--net", "--mount"]
    if (
        not is_isolated
        and shutil.which("ip")
        and subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode == 0
    ):
        os.execvp(unshare[0], [*unshare, sys.executable, "-m", "lab.test_dns", _OWN_NETWORK])
    with Fleet() as fleet:
        directory = fleet.directory
        if is_isolated:
            (directory / "resolv.conf").write_text(f"nameserver 127.0.0.1\nsearch {ZONE}\noptions ndots:5\n")
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            subprocess.run(["mount", "--bind", str(directory / "resolv.conf"), "/etc/resolv.conf"], check=True)
        print(
            "in a network of its own" if is_isolated else "on loopback: no network of its own is to be had", flush=True
        )
        code = asyncio.run(_run(fleet, is_isolated=is_isolated))
    sys.exit(code)


if __name__ == "__main__":
    main()
