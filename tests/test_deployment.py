"""Metrics that tests read from a deployment equal those of a scrape."""

from __future__ import annotations

from proxy.wire.openai import Api
from tests.asking import request
from tests.deployment import Deployment


async def test_metric_read_alone_equals_that_of_a_scrape(gateway: Deployment) -> None:
    await gateway.ask(request(Api.CHAT))
    await gateway.ask(request(Api.CHAT, n=0))
    scraped: dict[str, dict[tuple[str, ...], float]] = {}
    for family in gateway.worker.metrics.collect():
        for sample in family.samples:
            if sample.value and not family.name.startswith("process"):
                labels = tuple(sample.labels[label] for label in sorted(sample.labels))
                scraped.setdefault(sample.name, {})[labels] = sample.value
    assert {"pdproxy_requests_total", "pdproxy_instance_requests_total", "pdproxy_connections"} <= scraped.keys()
    assert scraped == {name: gateway.metrics(name) for name in scraped}
