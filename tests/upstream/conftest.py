"""An Upstream that closes no connection for its age."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.upstream.raw import LONG, new_upstream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proxy.upstream import Upstream


@pytest.fixture
async def upstream(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Upstream]:
    monkeypatch.setattr("proxy.upstream.upstream._KEEP_ALIVE_SECONDS", LONG)  # none is closed for its age
    async with new_upstream() as opened:
        yield opened
        assert opened.busy_connections == 0
