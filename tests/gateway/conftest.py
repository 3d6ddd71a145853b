"""Both roads, for the tests that compare them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.gateway.roads import Roads

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def roads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Roads:
    """Takes a conversation through two gateways, and compares what it comes to."""
    return Roads(tmp_path, monkeypatch)
