"""An Upstream that closes no connection for its age."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from proxy.upstream import Upstream
from tests.upstream.raw import LONG, new_upstream


@pytest.fixture
async def upstream(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Upstream]:
    monkeypatch.setattr("proxy.upstream.upstream._KEEP_ALIVE_SECONDS", LONG)  # none is closed for its age
    async with new_upstream() as opened:
        yield opened
        assert opened.busy_connections == 0
