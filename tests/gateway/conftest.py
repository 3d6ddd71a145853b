"""The fixture that compares both HTTP readers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.gateway.roads import Roads

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def roads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Roads:
    """Return an object that runs a conversation with both readers, and compares the results."""
    return Roads(tmp_path, monkeypatch)
