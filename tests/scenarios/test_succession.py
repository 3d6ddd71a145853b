"""A gateway that is started while another one has its ports."""

from __future__ import annotations

import signal
from contextlib import AbstractAsyncContextManager

import pytest

from proxy.wire.openai import Api
from tests.asking import ask, request
from tests.scenarios.conftest import Site
from tests.scenarios.program import SERVING, Program, gateway, running
from tests.scenarios.test_stopping import is_ready

WAITING = r"waiting for port \d+, which is in use"


def successor(*words: str, **environment: str) -> AbstractAsyncContextManager[Program]:
    """Start a gateway without waiting until it listens."""
    return running(words, f"({WAITING})", **environment)


@pytest.mark.fault(30)
@pytest.mark.parametrize("workers", ["1", "2"])
async def test_successor_waits_until_its_predecessor_accepts_no_more(site: Site, workers: str) -> None:
    engines = (*site.engines, "--workers", workers)
    async with gateway(*engines, PROXY_DRAIN__NOT_READY_SECONDS="3600") as old:
        await is_ready(site.session, old.url)
        old.signal(signal.SIGTERM)
        await old.says('"message":"draining","left":0')
        port = old.url.rsplit(":", 1)[1]
        async with successor(*engines, "--port", port) as new:
            assert (await ask(site.session, old.url, request(Api.CHAT))).is_done  # by the old one, which still accepts
            old.signal(signal.SIGTERM)
            await old.ended()
            await new.says(SERVING)
            await is_ready(site.session, old.url)
            assert (await ask(site.session, old.url, request(Api.CHAT))).is_done
            assert new.output.count("waiting for port") == 1
