"""The fuzz targets: modules of this package with a function `check_…` of the same name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

TARGETS: Final = (
    *("events", "answers", "documents", "headers", "grammar", "options", "keys", "streams"),
    *("messages", "responses", "replicas", "kv_events"),
)

INSTRUMENTED: Final = ("proxy", "yaml")
"""Packages whose branches guide the search."""

CORPUS: Final = Path(__file__).parent / "corpus"


def check_of(target: str) -> Callable[[bytes], None]:
    module = importlib.import_module(f"tests.fuzz.{target}")
    return cast("Callable[[bytes], None]", getattr(module, f"check_{target}"))


def examples_of(target: str) -> list[Path]:
    """Return the target's part of the corpus."""
    return sorted((CORPUS / target).iterdir())
