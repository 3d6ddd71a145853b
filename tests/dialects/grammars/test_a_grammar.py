"""A further grammar is one file and one line: answers of its models go on in the middle of their tool calls."""

from __future__ import annotations

import re

import pytest

from proxy.dialects import grammars
from proxy.sim.model import parser, tokenizer
from tests.conformance.resuming import WITH_USAGE, differences, generated, story, uninterrupted
from tests.dialects.grammars.tagged import TAGS, Tagged

ENGINE = {"eos_after": 100}  # as ever, but not to be taken for the engines of other tests
BODY = story(**WITH_USAGE)
PLACES = range(2, len(generated(BODY)), 9)


@pytest.fixture(autouse=True)
def _engines_with_such_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tokenizer and their parser know its tags."""
    tag_of = {tokenizer.MARKERS[token]: tag for token, tag in TAGS.items()}
    for token, tag in TAGS.items():
        monkeypatch.setitem(tokenizer.MARKERS, token, tag)
    monkeypatch.setattr(tokenizer, "_MARKER_IDS", {text: token for token, text in tokenizer.MARKERS.items()})
    monkeypatch.setattr(
        tokenizer, "_MARKER_PATTERN", re.compile("(" + "|".join(map(re.escape, tokenizer._MARKER_IDS)) + ")")
    )
    for name in ("_TRANSITIONS_WITH_REASONING", "_TRANSITIONS_OF_TOOL_CALLS"):
        spelled = {(phase, tag_of[marker]): following for (phase, marker), following in getattr(parser, name).items()}
        monkeypatch.setattr(parser, name, spelled)
    monkeypatch.setattr(parser, "_MARKERS", tuple(sorted(TAGS.values())))


@pytest.mark.parametrize("profile", ["v0.23", "v0.33"])
async def test_answers_of_its_models_are_whole_wherever_they_break_off(
    profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "GRAMMARS", (Tagged(), *grammars.GRAMMARS))
    calls = (await uninterrupted(profile, BODY, engine=ENGINE))["choices"][0]["tool_calls"]
    assert [call["name"] for call in calls] == ["find", "show"]
    assert not await differences(profile, BODY, PLACES, engine=ENGINE)


async def test_answers_without_their_grammar_are_not_continued_wrongly() -> None:
    """Kimi's grammar finds none of its markers, and what it makes of the text is not what the client has."""
    told = await differences("v0.23", BODY, [len(generated(BODY)) - 5], engine=ENGINE)
    assert ["could not be resumed" in error for error in told.values()] == [True]
