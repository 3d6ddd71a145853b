"""All inputs of the corpus, and mixtures of them, on every run of the suite."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.cutting import spelled
from tests.fuzz.targets import CORPUS, TARGETS, check_of, examples_of

# Imported here, because some targets import hypothesis tests, which hypothesis rejects within a test.
CHECKS = {target: check_of(target) for target in TARGETS}
EXAMPLES = [
    pytest.param(target, path, id=f"{target}-{path.name}") for target in TARGETS for path in examples_of(target)
]


@cache
def contents(target: str) -> list[bytes]:
    return [path.read_bytes() for path in examples_of(target)]


@st.composite
def mixtures(draw: st.DrawFn, target: str) -> bytes:
    """Draw the beginning of one example, random bytes, and the end of another."""
    first, second = draw(st.sampled_from(contents(target))), draw(st.sampled_from(contents(target)))
    begin, end = draw(st.integers(0, len(first))), draw(st.integers(0, len(second)))
    return first[:begin] + draw(st.binary(max_size=12)) + second[end:]


@pytest.mark.parametrize(("target", "path"), EXAMPLES)
def test_corpus_inputs_pass(target: str, path: Path) -> None:
    CHECKS[target](path.read_bytes())


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=50)
@given(data=st.data())
def test_mixtures_of_corpus_inputs_pass(target: str, data: st.DataObject) -> None:
    CHECKS[target](data.draw(mixtures(target) | st.binary(max_size=100)))


def test_every_example_belongs_to_a_target() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == set(TARGETS)
    assert all(contents(target) for target in TARGETS)


def test_large_byte_is_a_word_if_one_exists() -> None:
    assert spelled(b"a\x80\x81\xffb", [b"one", b"two"]) == b"aonetwo\xffb"
