"""All requests of the training succeed."""

from __future__ import annotations

from pathlib import Path

from lab.common.compiled.training import train


def test_all_requests_of_the_training_succeed() -> None:
    train(Path.cwd(), rounds=1)
