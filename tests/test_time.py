"""Clocks: whatever is decided is decided by the monotonic clock, so that setting the system's time changes nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "proxy"
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
# They show a time to people and decide nothing by it.
SHOW_IT = {Path("logs/handler.py"), Path("configuration/configuration.py")}


def calls(source: str) -> set[str]:
    """The functions called as `module.name`."""
    return {ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)}


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if "sim" not in path.relative_to(PACKAGE).parts and path.relative_to(PACKAGE) not in SHOW_IT
    ],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_nothing_is_decided_by_the_time_of_day(path: Path) -> None:
    assert not WALL_CLOCKS & calls(path.read_text(encoding="utf-8"))
