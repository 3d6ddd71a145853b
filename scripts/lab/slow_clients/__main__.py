"""What slow clients do to others: nothing, and they are cut off. Everything listens on 127.0.0.1 and is stopped.

Each attack lasts longer than the gateway's patience. Meanwhile somebody asks for short answers: all of them must come.
"""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import orjson
import uvloop

from lab.common.output import aligned
from lab.common.proc import open_fds
from lab.common.processes import HOST, free_ports, running, wait_until_ready

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

_CONNECTIONS = 200
_CONNECTIONS_PER_SECOND = 100
_STALLED_STREAMS = 10
_ATTACK_SECONDS = 15
_PATIENCE = {
    "PROXY_LISTEN__HEADER_SECONDS": "3",
    "PROXY_LISTEN__BODY_SECONDS": "4",
    "PROXY_LISTEN__KEEPALIVE_SECONDS": "4",
    "PROXY_LISTEN__WRITE_TIMEOUT_SECONDS": "3",
}
# Connections come for two seconds, and then it is patient for four.
_RID_WITHIN_SECONDS = 10.0
_CLEAN_EVERY_SECONDS = 0.05
# Connections of those who are not slow, and to the engines.
_OTHERS = 8
# Two cores run the attackers, the engines and the gateway.
_CLEAN_MUST_TAKE_SECONDS = 2.0
_CLEAN = {"model": "sim", "messages": [{"role": "user", "content": "Are you well?"}], "max_tokens": 4}
# Tens of megabytes, so that neither the kernel's buffers nor the gateway's can hold it.
_LARGE = {"model": "sim", "prompt": "x", "max_tokens": 100_000, "stream": True, "logprobs": 5}
_CUT = "pdproxy_rejected_total", "pdproxy_streams_broken_total"


@dataclass(slots=True)
class Clean:
    """What became of those who were not slow."""

    seconds: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def ask(self, url: str) -> None:
        """One request, on a connection of its own."""
        began = time.monotonic()
        try:
            timeout = aiohttp.ClientTimeout(total=10.0)
            async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url, json=_CLEAN) as response:
                if response.status != 200:
                    self.problems.append(f"status {response.status}")
        except (aiohttp.ClientError, TimeoutError) as error:
            self.problems.append(type(error).__name__)
        self.seconds.append(time.monotonic() - began)

    @property
    def is_well(self) -> bool:
        return not self.problems and max(self.seconds) < _CLEAN_MUST_TAKE_SECONDS


@dataclass(slots=True)
class Sockets:
    """What the gateway holds open, as the kernel says, from the beginning of an attack on."""

    pid: int
    held: list[tuple[float, int]] = field(default_factory=list)

    def look(self) -> None:
        self.held.append((time.monotonic(), open_fds(self.pid)))

    @property
    def most(self) -> int:
        """More than at first."""
        return max(fds for _, fds in self.held) - self.held[0][1]

    @property
    def free_after_seconds(self) -> float | None:
        """When it was rid of the attackers; None if it never was. Others come and go meanwhile."""
        began, at_first = self.held[0]
        crowded = [at for at, fds in self.held if fds > at_first + _OTHERS]
        return None if not crowded or crowded[-1] == self.held[-1][0] else crowded[-1] - began


@dataclass(frozen=True, slots=True)
class Attack:
    """One way of being slow, on one path."""

    name: str
    path: str
    run: Callable[[str], Coroutine[None, None, None]]


def _slowhttptest(*flags: str) -> Callable[[str], Coroutine[None, None, None]]:
    async def run(url: str) -> None:
        length = ("-c", str(_CONNECTIONS), "-r", str(_CONNECTIONS_PER_SECOND), "-l", str(_ATTACK_SECONDS))
        process = await asyncio.create_subprocess_exec(
            *("slowhttptest", *flags, *length, "-u", url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        if b"Exit status" not in output:
            sys.exit(f"slowhttptest failed:\n{output.decode(errors='replace')}")

    return run


async def _take_nothing(url: str) -> None:
    """Ask for long streams and read none of them."""
    address = re.fullmatch(r"http://([^:/]+):(\d+)/.*", url)
    assert address is not None
    body = orjson.dumps(_LARGE)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address[1]}\r\nContent-Length: {len(body)}\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(_STALLED_STREAMS):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((address[1], int(address[2])))
            client.sendall(head.encode() + body)
        await asyncio.sleep(_ATTACK_SECONDS)


_ATTACKS = (
    # A header, or a piece of body, every second.
    Attack("slow headers", "/livez", _slowhttptest("-H", "-i", "1")),
    Attack("slow body", "/v1/chat/completions", _slowhttptest("-B", "-i", "1", "-s", "8192")),
    # The largest answer to a GET there is, 32 bytes a second.
    Attack("slow reading", "/metrics", _slowhttptest("-X", "-w", "10", "-y", "20", "-n", "1", "-z", "32")),
    Attack("streams nobody reads", "/v1/completions", _take_nothing),
)


async def _suffer(attack: Attack, url: str, pid: int) -> tuple[str, ...]:
    """One attack; a row of the table."""
    clean, sockets = Clean(), Sockets(pid)
    before = await _counted(url)
    sockets.look()
    async with asyncio.TaskGroup() as group:
        attacking = group.create_task(attack.run(url + attack.path))
        while not attacking.done():
            group.create_task(clean.ask(url + "/v1/chat/completions"))
            await asyncio.sleep(_CLEAN_EVERY_SECONDS)
            sockets.look()
    after = await _counted(url)
    free = sockets.free_after_seconds
    return (
        attack.name,
        str(sockets.most),
        "never" if free is None else f"{free:.1f}",
        ", ".join(f"{name} {after[name] - before[name]:.0f}" for name in after if after[name] != before[name]) or "-",
        str(len(clean.seconds)),
        " ".join(map(str, (len(clean.problems), *sorted(set(clean.problems))))),
        f"{max(clean.seconds):.2f}",
        "ok" if clean.is_well and free is not None and free < _RID_WITHIN_SECONDS else "NOT OK",
    )


async def _counted(url: str) -> dict[str, float]:
    """What the gateway says of those it refused or cut."""
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    series = [line.rsplit(" ", 1) for line in lines if line.startswith(_CUT)]
    return {" ".join(re.findall(r'"([^"]*)"', name)): float(value) for name, value in series}


async def _attack_all(url: str, pid: int) -> bool:
    heads = ("attack", "connections", "rid of them after, s", "counted as", "others asked", "failed", "slowest, s", "")
    rows: list[tuple[str, ...]] = [heads]
    for attack in _ATTACKS:
        print(f"{attack.name} …", file=sys.stderr, flush=True)
        rows.append(await _suffer(attack, url, pid))
    print(f"\n{aligned(rows)}")
    return all(row[-1] == "ok" for row in rows[1:])


def main() -> None:
    """Everything, in turn."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prefill, decode, gateway = free_ports(3)
        for role, port in (("prefill", prefill), ("decode", decode)):
            command = [sys.executable, "-m", "proxy", "mock-engine", "--role", role, "--port", str(port)]
            stack.enter_context(running(f"the {role} engine", command, port, directory / f"{role}.log"))
        command = [sys.executable, "-m", "proxy", "--port", str(gateway)]
        command += ["--prefill", f"{HOST}:{prefill}", "--decode", f"{HOST}:{decode}"]
        pid = stack.enter_context(running("the gateway", command, gateway, directory / "gateway.log", _PATIENCE))
        wait_until_ready("the gateway", gateway, "/readyz")
        is_well = uvloop.run(_attack_all(f"http://{HOST}:{gateway}", pid))
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
