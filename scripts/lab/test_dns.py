"""Discovery by DNS: instances come and go in a real name server's zone while clients are served.

The server is killed, too. If the kernel allows it, everything runs in a separate network namespace: the gateway finds
the server by /etc/resolv.conf, on port 53, and names by its search list. Otherwise the server has a port on loopback.
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
    "messages": [{"role": "user", "content": "Hello?"}],
    "stream": True,
    "max_tokens": 30,
}
# These instances get no requests, but make an answer too long for a datagram.
_SPARE = [f"_http._tcp.decode SRV 20 0 7100 spare-{number}.of-a-rather-long-name" for number in range(60)]


class Knot(Program):
    """A real name server with one zone, which is rewritten and empty at first."""

    def __init__(self, directory: Path, port: int) -> None:
        file = directory / "knot.conf"
        file.write_text(_CONFIGURATION.format(directory=directory, address="127.0.0.1", port=port, zone=ZONE))
        command = ["knotd", "--config", str(file)]
        super().__init__(name="knotd", command=command, port=port, output=directory / "knot.log")
        self._zone = directory / "zone"
        self._serial = 0
        self.set_records(())

    def set_records(self, records: Sequence[str]) -> None:
        """Replace the records of the zone: lines of a zone file."""
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
    """Return the addresses of serving instances, and the problems of sources."""
    body = json.loads(fetch(gateway.url + "/instances"))
    serving = {one["address"] for one in body["instances"] if (one["membership"], one["state"]) == ("enabled", "up")}
    return serving, {source["problem"] for source in body["sources"] if source["problem"]}


@dataclass
class Zone:
    """The zone, and the gateway that follows it."""

    knot: Knot
    gateway: Gateway
    load: Load
    prefill_port: int
    decode_host: str

    def set_records(self, prefillers: Sequence[str], decoders: Sequence[int], *more: str) -> set[str]:
        """Set the zone. Return the addresses that should serve as a result."""
        self.knot.set_records(
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

    async def wait_until_serving(self, what: str, expected: set[str], *, has_problem: bool = False) -> str:
        """Wait until exactly these addresses serve, and sources have a problem or not. Return the problem."""
        serving: set[str] = set()
        problems: set[str] = set()
        try:
            async with asyncio.timeout(_FOLLOWED_SECONDS):
                while serving != expected or bool(problems) != has_problem:
                    await asyncio.sleep(0.1)
                    serving, problems = await asyncio.to_thread(_instances, self.gateway)
        except TimeoutError:
            sys.exit(f"{what}: expected {expected}, but {serving} serve; {problems} {self.load.problems[:3]}")
        return next(iter(problems), "")

    async def check(self, what: str, expected: set[str], *, has_problem: bool = False) -> None:
        """Do the same, and wait until some more requests have been served."""
        problem = await self.wait_until_serving(what, expected, has_problem=has_problem)
        await self.load.have_ended(2 * _CLIENTS)
        print(f"{what}: {len(expected)} serve" + (f" ({problem})" if problem else ""), flush=True)


def _started(fleet: Fleet, is_isolated: bool) -> tuple[Knot, Gateway]:
    """Start engines, the name server, and the gateway, which gets only names."""
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
    gateway.ready_path = ""  # not ready while the zone is empty
    return knot, fleet.keep(gateway)


async def _run(fleet: Fleet, *, is_isolated: bool) -> int:
    knot, gateway = _started(fleet, is_isolated)
    decoders = fleet.decode
    connections, question = Connections(gateway.port), post(gateway.port, _QUESTION)

    async def ask(_: int) -> str:
        return (await connections.ask(question)).problem()

    load = Load(ask)
    # Names in SRV records are resolved by the system, which uses this server only in the separate network.
    zone = Zone(knot, gateway, load, fleet.prefill[0], f"here.{ZONE}" if is_isolated else "localhost")
    expected = zone.set_records(_PREFILLERS, decoders)
    await zone.wait_until_serving("at first", expected)
    async with load.at_a_time(_CLIENTS):
        await zone.check("the whole zone", expected)
        await zone.check("a prefiller and two decoders removed", zone.set_records(_PREFILLERS[:1], decoders[2:]))
        await zone.check(
            "all, in an answer longer than a datagram",
            expected := zone.set_records(_PREFILLERS, decoders, *_SPARE),
        )
        knot.set_records(())
        await zone.check("no names", expected, has_problem=True)
        await zone.check("names again, with two decoders", expected := zone.set_records(_PREFILLERS, decoders[:2]))
        await asyncio.to_thread(knot.end, signal.SIGKILL)
        await zone.check("name server killed", expected, has_problem=True)
        expected = zone.set_records(_PREFILLERS[1:], decoders[1:])
        await asyncio.to_thread(knot.restart)
        await zone.check("name server started, with other names", expected)
    print(f"{load.ended} requests, {len(load.problems)} failures {load.problems[:3] or ''}")
    return int(bool(load.problems))


def main() -> None:
    """Run the test, in a separate network if possible."""
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
            "in a separate network" if is_isolated else "on loopback: a separate network is not available", flush=True
        )
        code = asyncio.run(_run(fleet, is_isolated=is_isolated))
    sys.exit(code)


if __name__ == "__main__":
    main()
