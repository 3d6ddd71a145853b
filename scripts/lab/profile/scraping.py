"""Duration of a scrape of /metrics, and its effect on streams: `--scraping`.

A gateway with several workers and many cheap engines serves 200 paced streams and consecutive scrapes, many more than
any Prometheus sends. Rounds with and without scrapes alternate.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from lab.bench.scenarios import PACED
from lab.common.fleet import Fleet, Gateway
from lab.common.load import Histogram
from lab.common.output import aligned
from lab.profile.sampling import ask

_ROUNDS: Final = 3
_PAUSE_SECONDS: Final = 0.1


def table(seconds: float, instances: int = 64, workers: int = 4) -> str:
    """Return ms per scrape, and between two tokens with and without scrapes."""
    scrapes = Histogram()
    gaps = {is_scraped: Histogram() for is_scraped in (False, True)}
    with Fleet() as fleet:
        fleet.cheap_engines(instances // 2, instances // 2)
        gateway = fleet.keep(fleet.gateway("--workers", str(workers)))
        ask(fleet, gateway, PACED, 1.0)  # all workers have used all instances
        for _ in range(_ROUNDS):
            for is_scraped, histogram in gaps.items():
                with scraping(gateway, scrapes) if is_scraped else ExitStack():
                    result = ask(fleet, gateway, PACED, seconds).result
                if result.errors:
                    sys.exit(f"some requests failed: {result.errors}")
                for bucket, count in result.gaps.items():
                    histogram.counts[bucket] = histogram.counts.get(bucket, 0) + count
        size = len(gateway.metrics())
    rows = [
        ("ms", "p50", "p99", "most"),
        (f"a scrape: {instances} instances, {workers} workers, {size / 1000:,.0f} kB", *_figures(scrapes)),
        ("between two tokens, without scrapes", *_figures(gaps[False])),
        ("between two tokens, with consecutive scrapes", *_figures(gaps[True])),
    ]
    return f"{aligned(rows)}\n{sum(scrapes.counts.values())} scrapes"


@contextmanager
def scraping(gateway: Gateway, scrapes: Histogram) -> Iterator[None]:
    """Scrape repeatedly during the block, on new connections, which any worker may accept."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(_PAUSE_SECONDS):
            began = time.perf_counter()
            gateway.metrics()
            scrapes.add(time.perf_counter() - began)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _figures(histogram: Histogram) -> tuple[str, ...]:
    return tuple(f"{histogram.milliseconds(share):.1f}" for share in (0.5, 0.99, 1.0))
