"""Instances come and go in the zone of a real name server, which is also killed, while clients are served.

Where the kernel allows it, all of this is in a network of its own: the gateway then finds the server by an
/etc/resolv.conf, on port 53, and names by its search list. Otherwise the server has a port on loopback.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from lab.common.invocation import unwind_on_signals
from lab.common.processes import HOST, free_ports, running
from lab.test_dns.knot import ZONE, Knot

if TYPE_CHECKING:
    from collections.abc import Sequence

_OWN_NETWORK = "--in-own-network"
_CLIENTS = 6
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


@dataclass
class Clients:
    """They ask again and again until the end of the block."""

    url: str
    served: int = 0
    failures: list[str] = field(default_factory=list)
    _wanted: int = 0
    _enough: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Clients:
        self._session = aiohttp.ClientSession()
        self._tasks = [asyncio.create_task(self._ask_on()) for _ in range(_CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    async def have_served(self, more: int) -> None:
        """Wait until so many more requests have ended."""
        self._enough.clear()
        self._wanted = self.served + more
        await self._enough.wait()

    async def _ask_on(self) -> None:
        while True:
            try:
                async with self._session.post(f"{self.url}/v1/chat/completions", json=_QUESTION) as response:
                    text = await response.text()
                is_whole = response.status == 200 and text.rstrip().endswith("data: [DONE]")
                if not is_whole:
                    self.failures.append(f"{response.status}: {text[-200:]}")
            except aiohttp.ClientError as error:
                self.failures.append(repr(error))
            self.served += 1
            if self.served >= self._wanted:
                self._enough.set()


async def _instances(session: aiohttp.ClientSession, url: str) -> tuple[set[str], set[str]]:
    """The addresses of those that serve, and what is wrong with sources."""
    async with session.get(f"{url}/instances") as response:
        told = json.loads(await response.read())
    serving = {one["address"] for one in told["instances"] if (one["membership"], one["state"]) == ("enabled", "up")}
    return serving, {source["problem"] for source in told["sources"] if source["problem"]}


@dataclass
class Fleet:
    """What there is to be, and what the gateway makes of it."""

    knot: Knot
    clients: Clients
    session: aiohttp.ClientSession
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
                    serving, problems = await _instances(self.session, self.clients.url)
        except TimeoutError:
            sys.exit(
                f"{what}: {expected} were expected, and there are {serving}; {problems} {self.clients.failures[:3]}"
            )
        return next(iter(problems), "")

    async def becomes(self, what: str, expected: set[str], *, has_problem: bool = False) -> None:
        """The same, and then some more must be served."""
        problem = await self.serves(what, expected, has_problem=has_problem)
        await self.clients.have_served(2 * _CLIENTS)
        print(f"{what}: {len(expected)} serve" + (f" ({problem})" if problem else ""), flush=True)


async def _run(directory: Path, *, is_isolated: bool) -> int:
    async with AsyncExitStack() as stack:
        *decoders, prefill_port, port = free_ports(6)
        server_port = 53 if is_isolated else free_ports(1)[0]

        def start(name: str, port: int, *words: object, environ: dict[str, str] | None = None) -> None:
            command = [sys.executable, "-m", "proxy", *map(str, words)]
            stack.enter_context(running(name, command, port, directory / f"{name}.log", environ))

        for number, address in enumerate(_PREFILLERS):
            words = ("mock-engine", "--role", "prefill", "--host", address, "--port", prefill_port, "--model", "sim")
            command = [sys.executable, "-m", "proxy", *map(str, words)]
            stack.enter_context(
                running(f"prefill-{number}", command, prefill_port, directory / f"prefill-{number}.log", host=address)
            )
        for at in decoders:
            start(
                f"decode-{at}",
                at,
                "mock-engine",
                "--role",
                "decode",
                "--port",
                at,
                "--model",
                "sim",
                "--decode-step-ms",
                5,
            )
        knot = await stack.enter_async_context(Knot(directory, "127.0.0.1", server_port))
        names = {"PREFILL": f"prefill:{prefill_port}", "DECODE": "_http._tcp.decode"}
        environ = {"PROXY_HEALTH__CHANGING_INTERVAL_SECONDS": "0.2", "PROXY_DISCOVERY__DNS_MIN_SECONDS": "0.2"}
        if not is_isolated:
            names = {"PREFILL": f"prefill.{ZONE}:{prefill_port}", "DECODE": f"_http._tcp.decode.{ZONE}"}
            environ["PROXY_DISCOVERY__DNS_SERVERS"] = f"127.0.0.1:{server_port}"
        environ |= {f"PROXY_DISCOVERY__{role}_DNS": name for role, name in names.items()}
        start("gateway", port, "--port", port, environ=environ)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        url = f"http://{HOST}:{port}"
        clients = Clients(url)
        # What SRV records name is looked up by the system, which asks this server in its own network only.
        fleet = Fleet(knot, clients, session, prefill_port, f"here.{ZONE}" if is_isolated else "localhost")
        expected = fleet.say(_PREFILLERS, decoders)
        await fleet.serves("at first", expected)
        async with clients:
            await fleet.becomes("what the zone has", expected)
            await fleet.becomes("a prefiller and two decoders less", fleet.say(_PREFILLERS[:1], decoders[2:]))
            await fleet.becomes(
                "all, in an answer for which a datagram is too small",
                expected := fleet.say(_PREFILLERS, decoders, *_SPARE),
            )
            fleet.knot.say(())
            await fleet.becomes("the names are gone", expected, has_problem=True)
            await fleet.becomes("they are back, with two decoders", expected := fleet.say(_PREFILLERS, decoders[:2]))
            await knot.end()
            await fleet.becomes("the name server is killed", expected, has_problem=True)
            expected = fleet.say(_PREFILLERS[1:], decoders[1:])
            await knot.start()
            await fleet.becomes("it is back, with others", expected)
        print(f"{clients.served} requests, {len(clients.failures)} failures {clients.failures[:3] or ''}")
        return int(bool(clients.failures))


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
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if is_isolated:
            (directory / "resolv.conf").write_text(f"nameserver 127.0.0.1\nsearch {ZONE}\noptions ndots:5\n")
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            subprocess.run(["mount", "--bind", str(directory / "resolv.conf"), "/etc/resolv.conf"], check=True)
        print(
            "in a network of its own" if is_isolated else "on loopback: no network of its own is to be had", flush=True
        )
        code = asyncio.run(_run(directory, is_isolated=is_isolated))
    sys.exit(code)


if __name__ == "__main__":
    main()
