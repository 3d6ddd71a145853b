"""Pytest plugin for the short and the full suite, and the number of their processes."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest

from tests.selection.covering import covering, pairs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all rows of the tests that otherwise run some of them")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for mark in metafunc.definition.iter_markers("covering"):
        _parametrize(metafunc, *mark.args, **mark.kwargs)


def _parametrize(
    metafunc: pytest.Metafunc,
    names: str,
    rows: Iterable[tuple[Any, ...]],
    shows: Callable[[tuple[Any, ...]], Iterable[Hashable]] = pairs,
) -> None:
    """Parametrize with all rows if --full is given, and otherwise with rows that cover the same evidence."""
    rows = list(rows)
    if not metafunc.config.getoption("full"):
        rows = covering(rows, shows)
    metafunc.parametrize(names.split(), rows, ids=str)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return two processes more than processors for `-n auto`, because tests wait; none for a test or a file.

    A worker takes some seconds to start, because each one collects all tests.
    """
    option = config.option
    if option.keyword or option.usepdb or option.collectonly or any(".py" in name for name in config.args):
        return 0
    return len(os.sched_getaffinity(0)) + 2


def pytest_collection_finish() -> None:
    """Exclude the present objects, which live until the end, from garbage collection after each test.

    It comes seldom: a gateway is made of some ten thousand objects, all of which go with it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
