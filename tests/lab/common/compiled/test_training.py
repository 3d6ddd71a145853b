"""What the gateway is asked before it is compiled is answered."""

from __future__ import annotations

from pathlib import Path

from lab.common.compiled.training import train


def test_all_that_is_asked_in_training_is_answered() -> None:
    train(Path.cwd(), rounds=1)
