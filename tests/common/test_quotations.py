"""Quotations of a request are removed from the words of an engine."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.common.quotations import RUN_CHARACTERS, without_quotations

CUDA = "CUDA error: an illegal memory access was encountered"
PROMPT = "The launch code of the submarine is 4711-Tango.\nKeep it secret, even from Anna Müller."

_words = st.text(min_size=1, max_size=60)


def _plain(text: str) -> str:
    """Return a text in lower case, with one space for each run of white space and control characters."""
    text = " ".join(text.split())
    return " ".join("".join(each if each.isprintable() else " " for each in text).split()).casefold()


@pytest.mark.parametrize("texts", [[], ["user", "Tell me about GPUs and their memory."], [PROMPT]])
def test_words_of_the_engine_alone_are_kept(texts: list[str]) -> None:
    assert without_quotations(CUDA, texts) == CUDA


@pytest.mark.parametrize("spelled", [str, str.upper, repr, json.dumps, lambda text: " \t".join(text.split(" "))])
def test_quoted_prompt_is_replaced_in_all_spellings(spelled: Callable[[str], str]) -> None:
    found = without_quotations(f"{CUDA} while processing {spelled(PROMPT)}", [PROMPT])
    assert found.startswith(CUDA)
    assert "…" in found
    for word in ("launch", "submarine", "4711", "Tango", "secret", "Anna", "ller"):
        assert word.lower() not in found.lower()


@pytest.mark.parametrize("secret", ["c4n4ry", "4711", "Anna"])
def test_whole_short_strings_and_words_with_digits_are_quotations(secret: str) -> None:
    assert secret not in without_quotations(f"bad value {secret} here", [secret])
    if not secret.isalpha():
        assert secret not in without_quotations(f"bad value {secret} here", [f"my code is {secret}, keep it"])


def test_message_that_is_all_quotation_is_empty() -> None:
    assert without_quotations(PROMPT, [PROMPT]) == without_quotations("c4n4ry!", ["c4n4ry"]) == ""


def test_texts_that_are_too_long_to_search_leave_no_words() -> None:
    assert without_quotations(CUDA, ["x" * 2_000_000]) == ""


@given(
    prompt=st.text(min_size=1, max_size=200),
    cut=st.tuples(st.integers(0, 200), st.integers(0, 200)),
    before=_words,
    after=_words,
)
def test_no_long_run_of_a_prompt_survives(prompt: str, cut: tuple[int, int], before: str, after: str) -> None:
    """The prompt consists of any characters, and the message quotes any part of it."""
    found = _plain(without_quotations(before + prompt[min(cut) : max(cut)] + after, [prompt]))
    given_prompt = _plain(prompt)
    runs = {found[start : start + RUN_CHARACTERS] for start in range(len(found) - RUN_CHARACTERS + 1)}
    assert not [run for run in runs if run in given_prompt]


@given(words=_words, texts=st.lists(st.text(max_size=30), max_size=3))
def test_result_adds_nothing_but_the_ellipsis(words: str, texts: list[str]) -> None:
    found = without_quotations(words, texts)
    letters = {each for each in found if each.isalnum()}
    assert letters <= set(words) or "\\" in words
