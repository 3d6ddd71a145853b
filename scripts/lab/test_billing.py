"""Compare the usage of client keys with the answers of clients, while engines are killed.

Every request is streamed with its usage, and the tokens of its answer are counted by their ids. For each key, the sum
of `/admin/usage` over all gateways must be the same: requests by result, tokens of prompts, and tokens of answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import uvloop

from lab.common.fleet import STOPS_SOON, Fleet, Gateway, store, store_url, wait_for_peers
from lab.common.load import Answer, ask, post
from lab.common.output import aligned
from lab.common.processes import Program, fetch, quiet_ports, unwind_on_signals

_KEYS, _GATEWAYS, _WORKERS, _DECODERS = 5, 2, 3, 4
_AT_A_TIME = 24
_SECONDS_BETWEEN_KILLS = 1.5
_SCRAPES = 25
_SCRAPED_INSTANCES, _SCRAPED_KEYS = 64, 50


@dataclass
class _Usage:
    """The usage of one key, counted by its clients or reported by the gateways."""

    requests: int = 0
    results: Counter[str] = field(default_factory=Counter)
    prompt: int = 0
    completion: int = 0

    def row(self) -> tuple[str, ...]:
        results = " ".join(f"{name} {count}" for name, count in sorted(self.results.items()) if count)
        return (*map(str, (self.requests, self.prompt, self.completion)), results)


def main() -> None:
    unwind_on_signals()
    options = _options()
    problems = _check_billing(options.requests, options.seed)
    _measure_scrapes()
    sys.exit("; ".join(problems) or None)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/test-billing", description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="number of requests (default: 1000)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the requests (default: 1)")
    options = parser.parse_args()
    if not 1 <= options.requests <= 100_000:
        parser.error("--requests must be 1 to 100,000")
    return options


def _settings(fleet: Fleet, name: str, count: int, **sections: Any) -> dict[str, Any]:
    """Return the settings of a gateway with this number of client keys."""
    keys = fleet.directory / f"{name}-keys.yaml"
    entries = [{"name": f"key-{number}", "key": f"sk-key-{number}"} for number in range(count)]
    keys.write_text(json.dumps({"keys": entries}), encoding="utf-8")
    return {
        "listen": {"port": quiet_ports(1)[0]},
        "prefill": [f"127.0.0.1:{port}" for port in fleet.prefill],
        "decode": [f"127.0.0.1:{port}" for port in fleet.decode],
        "auth": {"client_keys_file": str(keys)},
        "admin": {"usage_file": str(fleet.directory / f"{name}.db")},
        **sections,
    }


def _check_billing(requests: int, seed: int) -> list[str]:
    """Serve the requests, and return the differences."""
    with Fleet() as fleet:
        fleet.mock_engines(2, _DECODERS, "--decode-step-ms", "5")
        fleet.wait()
        shared = fleet.keep(store(quiet_ports(1)[0], fleet.directory))
        replicas = {"url": store_url(shared.port), "key_limits": True}
        gateways = [
            fleet.keep(_gateway(fleet, f"gateway-{number}", workers=_WORKERS, replicas=replicas))
            for number in range(_GATEWAYS)
        ]
        wait_for_peers(gateways, _GATEWAYS - 1)
        received = uvloop.run(_serve(gateways, fleet.engines["decode"], requests, seed))
        resumed = sum(gateway.figure("resumes_total") for gateway in gateways)
        reported = _reported(gateways)
        for gateway in gateways:  # each worker writes its last requests when it ends
            gateway.end()
            gateway.start()
            gateway.wait()
        kept = _reported(gateways)
    rows: list[tuple[str, ...]] = [("key", "", "requests", "prompt", "completion", "results")]
    for key, usage in sorted(received.items()):
        rows += [(key, "clients", *usage.row()), ("", "reported", *reported[key].row())]
    print(aligned(rows))
    print(f"\n{resumed:g} answers were resumed.\n")
    problems = [
        f"{key}: clients {usage}, reported {reported[key]}" for key, usage in received.items() if usage != reported[key]
    ]
    problems += [f"{key}: {kept[key]} after a restart" for key in received if kept[key] != reported[key]]
    if resumed <= 0:
        problems.append("no answer was resumed, so the kills have shown nothing")
    return problems


def _gateway(fleet: Fleet, name: str, keys: int = _KEYS, **sections: Any) -> Gateway:
    gateway = fleet.configured(name, _settings(fleet, name, keys, **sections))
    gateway.environment = STOPS_SOON
    return gateway


async def _serve(gateways: list[Gateway], decoders: list[Program], requests: int, seed: int) -> dict[str, _Usage]:
    """Serve the requests while decoders are killed. Return the usage of each key by its clients' answers."""
    draw = random.Random(seed)
    received: dict[str, _Usage] = {f"key-{number}": _Usage() for number in range(_KEYS)}
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            name = f"key-{draw.randrange(_KEYS)}"
            port = draw.choice(gateways).port
            body = {
                "model": "sim",
                "prompt": f"{number} " + "word " * draw.randint(1, 200),
                "max_tokens": draw.randint(1, 120),
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
            request = post(port, body, "/v1/completions").replace(b"Bearer bench", f"Bearer sk-{name}".encode())
            _add(received[name], await ask(port, request))

    killing = asyncio.get_running_loop().create_task(_kill(decoders, draw))
    try:
        async with asyncio.TaskGroup() as clients:
            for _ in range(_AT_A_TIME):
                clients.create_task(client())
    finally:
        killing.cancel()
        with suppress(asyncio.CancelledError):
            await killing
    return received


async def _kill(decoders: list[Program], draw: random.Random) -> None:
    """Kill one decoder after the other, and start it again."""
    while True:
        await asyncio.sleep(_SECONDS_BETWEEN_KILLS)
        decoder = draw.choice(decoders)
        decoder.send(signal.SIGKILL)
        await asyncio.to_thread(decoder.end)
        decoder.start()
        await asyncio.to_thread(decoder.wait)


def _add(usage: _Usage, answer: Answer) -> None:
    """Add an answer to the usage of its key."""
    usage.requests += 1
    counts: dict[str, int] | None = None
    completion = 0
    for event in answer.body.split(b"\n\n"):
        data = event.removeprefix(b"data: ")
        if not data.startswith(b"{"):
            continue
        payload = json.loads(data)
        counts = payload.get("usage") or counts
        completion += sum(len(choice.get("token_ids") or ()) for choice in payload.get("choices", ()))
    is_ok = not answer.problem() or (answer.status == 200 and answer.is_whole and b'"error"' not in answer.body)
    usage.results["ok" if is_ok else "failed"] += 1
    usage.completion += completion
    if counts is not None:
        usage.prompt += counts["prompt_tokens"]
        if counts["completion_tokens"] != completion:
            usage.results["usage differs from the tokens"] += 1


def _reported(gateways: list[Gateway]) -> dict[str, _Usage]:
    """Return the sums of the gateways' reports."""
    time.sleep(1)  # every worker counts its last requests within 0.2 s
    found: dict[str, _Usage] = {f"key-{number}": _Usage() for number in range(_KEYS)}
    for gateway in gateways:
        for row in json.loads(fetch(gateway.url + "/admin/usage"))["usage"]:
            usage = found.setdefault(row["key"], _Usage())
            usage.requests += row["requests"]
            usage.prompt += row["prompt_tokens"]
            usage.completion += row["completion_tokens"]
            usage.results.update(
                {name: row[name] for name in ("ok", "failed", "limited", "rejected", "left") if row[name]}
            )
    return found


def _measure_scrapes() -> None:
    """Print the time and the size of a scrape with many instances, with many keys and with one."""
    counts = (1, _SCRAPED_KEYS)
    with Fleet() as fleet:
        fleet.cheap_engines(_SCRAPED_INSTANCES // 2, _SCRAPED_INSTANCES // 2)
        gateways = [fleet.keep(_gateway(fleet, f"scraped-{keys}", keys, workers=_WORKERS)) for keys in counts]
        seconds: list[list[float]] = [[] for _ in gateways]
        for _ in range(_SCRAPES):
            for gateway, times in zip(gateways, seconds, strict=True):
                began = time.perf_counter()
                gateway.metrics()
                times.append(time.perf_counter() - began)
        rows = [("instances", "keys", "milliseconds", "KB")]
        for keys, gateway, times in zip(counts, gateways, seconds, strict=True):
            size = len(gateway.metrics()) / 1024
            rows.append((str(_SCRAPED_INSTANCES), str(keys), f"{1000 * min(times):.1f}", f"{size:.0f}"))
    print(aligned(rows))


if __name__ == "__main__":
    main()
