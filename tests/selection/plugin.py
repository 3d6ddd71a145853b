"""The short suite and the full one, and how many processes run them."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING, Any

import pytest

from tests.selection.covering import covering, pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable


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
    """With all rows if --full is given, and otherwise with as many as show what all of them show."""
    rows = list(rows)
    if not metafunc.config.getoption("full"):
        rows = covering(rows, shows)
    metafunc.parametrize(names.split(), rows, ids=str)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For `-n auto`: two more than there are processors, because tests wait now and then; none for a test or a file.

    A worker takes some seconds to start, because it collects all tests by itself.
    """
    option = config.option
    if option.keyword or option.usepdb or option.collectonly or any(".py" in name for name in config.args):
        return 0
    return len(os.sched_getaffinity(0)) + 2


def pytest_collection_finish() -> None:
    """What is there now stays until the end, so the garbage collector need not look at it after every test.

    It comes seldom: a gateway is made of some ten thousand objects, all of which go with it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
