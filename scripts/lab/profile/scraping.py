"""What a scrape of /metrics takes, and what streams notice of it: `scripts/profile --scraping`.

A gateway of several workers in front of many engines that cost next to nothing, 200 paced streams, and scrapes that
follow each other at once: far more than any Prometheus asks for. Rounds with and without them take turns.
"""

from __future__ import annotations

import http.client
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lab.bench.histogram import Histogram
from lab.bench.scenarios import PACED
from lab.common import peers
from lab.common.processes import HOST, quiet_ports, running, wait_until_ready
from lab.common.table import aligned
from lab.profile.asking import ask

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROUNDS: Final = 3
_PAUSE_SECONDS: Final = 0.1


def table(seconds: float, instances: int = 64, workers: int = 4) -> str:
    """Milliseconds of a scrape, and between two tokens with and without scrapes; rounds of so many seconds."""
    scrapes, size = Histogram(), 0
    gaps = {is_scraped: Histogram() for is_scraped in (False, True)}
    with gateway(instances, workers) as port:
        ask(port, PACED, 1.0)  # every worker knows every instance then
        for _ in range(_ROUNDS):
            for is_scraped, histogram in gaps.items():
                with scraping(port, scrapes) if is_scraped else ExitStack():
                    result = ask(port, PACED, seconds)
                if result.errors:
                    sys.exit(f"some requests failed: {result.errors}")
                for bucket, count in result.gaps.items():
                    histogram.counts[bucket] = histogram.counts.get(bucket, 0) + count
        size = scrape(port)
    rows = [
        ("ms", "p50", "p99", "most"),
        (f"a scrape: {instances} instances, {workers} workers, {size / 1000:,.0f} kB", *_figures(scrapes)),
        ("between two tokens, nobody scrapes", *_figures(gaps[False])),
        ("between two tokens, one scrape after the other", *_figures(gaps[True])),
    ]
    return f"{aligned(rows)}\n{sum(scrapes.counts.values())} scrapes"


@contextmanager
def gateway(instances: int, workers: int) -> Iterator[int]:
    """Half of the instances prefill, half decode. Yields the gateway's port."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port, *ports = quiet_ports(1 + instances)
        prefill, decode = ports[: instances // 2], ports[instances // 2 :]
        words = (",".join(map(str, prefill)), ",".join(map(str, decode)))
        engines = [sys.executable, "-m", "lab.bench.engines", *words]
        stack.enter_context(running("the engines", engines, decode[-1], directory / "engines"))
        peer = peers.ours()
        command = [*peer.command(port, prefill, decode), "--workers", str(workers)]
        stack.enter_context(running(peer.name, command, port, directory / "gateway"))
        wait_until_ready(peer.name, port, peer.ready_path)
        yield port


@contextmanager
def scraping(port: int, scrapes: Histogram) -> Iterator[None]:
    """Scrape again and again meanwhile."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(_PAUSE_SECONDS):
            began = time.perf_counter()
            scrape(port)
            scrapes.add(time.perf_counter() - began)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def scrape(port: int) -> int:
    """The bytes of one, on a connection of its own, which any worker may take."""
    with closing(http.client.HTTPConnection(HOST, port, timeout=30)) as connection:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        told = answer.read()
    if answer.status != 200:
        sys.exit(f"/metrics is {answer.status}")
    return len(told)


def _figures(histogram: Histogram) -> tuple[str, ...]:
    return tuple(f"{histogram.milliseconds(share):.1f}" for share in (0.5, 0.99, 1.0))
