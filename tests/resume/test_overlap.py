"""The repeated part of a decoder's stream is separated from the new part."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.resume.overlap import AnswerMismatch, cut_known_part
from tests.resume.test_seam import choice, transcript_of


@pytest.mark.parametrize(
    ("said", "new"),
    [
        ({"reasoning": "Let.", "content": "Hi"}, {}),
        ({"reasoning": "Let.", "content": "Hi you"}, {"content": " you"}),
        ({"reasoning": "Let.", "content": "Hi", "tool_calls": [{"index": 0}]}, {"tool_calls": [{"index": 0}]}),
    ],
)
def test_overlap_is_the_text_that_the_client_lacks(said: dict[str, Any], new: dict[str, Any]) -> None:
    assert cut_known_part(transcript_of((choice(reasoning="Let."), [1]), (choice(content="Hi"), [2])), said) == new


@pytest.mark.parametrize("said", [{}, {"reasoning": "Let."}, {"reasoning": "Let.", "content": "H"}, {"content": "Hi"}])
def test_text_that_says_less_than_the_client_has_is_another(said: dict[str, Any]) -> None:
    with pytest.raises(AnswerMismatch):
        cut_known_part(transcript_of((choice(reasoning="Let."), [1]), (choice(content="Hi"), [2])), said)
