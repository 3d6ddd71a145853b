"""Compares a decoder's stream with the part of the answer that the client already has. No IO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from proxy.resume.transcript import Transcript

TEXT_MEMBERS: Final = ("reasoning", "reasoning_content", "content")
"""The members of a chat's delta that hold text."""


class AnswerMismatch(Exception):
    """The decoder's stream differs from the part of the answer that the client has."""


class ReplayedAnswer:
    """The part of the client's answer that the new decoder has not repeated yet.

    It shrinks while the decoder repeats it.
    """

    def __init__(self, transcript: Transcript) -> None:
        self.ids = transcript.ids.tolist()
        """The token ids that are not repeated yet. `count_repeated_ids` removes ids."""
        self._remaining_texts = {
            transcript.reasoning_field: transcript.reasoning_text,
            "content": transcript.content_text,
        }
        self._arguments = [call.arguments for call in transcript.tools]
        self._headers = [(call.id, call.name) for call in transcript.tools]
        self._calls_left = set(range(len(transcript.tools)))
        self._places_of_calls: dict[object, int] = {}
        """The position of each repeated tool call among the calls, by its index.

        Engines may leave gaps between indices.
        """
        self._is_past_reasoning = bool(transcript.content_text or transcript.tools)

    @property
    def is_exhausted(self) -> bool:
        """Whether the decoder has repeated the whole text and all tool calls. Token ids do not count."""
        return not (any(self._remaining_texts.values()) or any(self._arguments) or self._calls_left)

    @property
    def unrepeated_content(self) -> str:
        """The content that is not repeated yet. Empty if anything besides content is not repeated yet."""
        rest = self._remaining_texts["content"]
        is_rest = not (any(self._arguments) or self._calls_left or sum(map(bool, self._remaining_texts.values())) > 1)
        return rest if is_rest else ""

    def cut_repeated_part(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Return the part of a delta that the client does not have.

        Raises AnswerMismatch if the rest differs from the answer.
        """
        new = {name: value for name, value in delta.items() if name != "tool_calls" and name not in TEXT_MEMBERS}
        for name in TEXT_MEMBERS:
            if text := delta.get(name):
                if name == "content" and any(
                    self._remaining_texts[other] for other in self._remaining_texts if other != name
                ):
                    raise AnswerMismatch  # reasoning comes first
                rest, self._remaining_texts[name] = _differing_ends(text, self._remaining_texts.get(name, ""))
                if rest and name != "content" and self._is_past_reasoning:
                    raise AnswerMismatch
                if rest:
                    new[name] = rest
        parts = [part for part in map(self._cut_repeated_call, delta.get("tool_calls") or ()) if part]
        return new | {"tool_calls": parts} if parts else new

    def _cut_repeated_call(self, part: dict[str, Any]) -> dict[str, Any] | None:
        index = part.get("index", 0)
        place = self._places_of_calls.setdefault(index, len(self._places_of_calls))
        if place >= len(self._headers):
            return part
        self._calls_left.discard(place)
        function = part.get("function") or {}
        said = (part.get("id"), function.get("name"))
        if any(mine is not None and mine != its for mine, its in zip(said, self._headers[place], strict=True)):
            raise AnswerMismatch
        rest, self._arguments[place] = _differing_ends(function.get("arguments") or "", self._arguments[place])
        return {"index": index, "function": {"arguments": rest}} if rest else None


def count_repeated_ids(ids: list[int], known: list[int]) -> int:
    """Count the first ids that repeat `known` ids, and remove these from `known`.

    Raises AnswerMismatch if the ids differ.
    """
    count = min(len(ids), len(known))
    if ids[:count] != known[:count]:
        raise AnswerMismatch
    del known[:count]
    return count


def cut_known_part(transcript: Transcript, delta_so_far: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a delta that the client does not have. `delta_so_far` is a delta with the whole answer so far.

    Raises AnswerMismatch if the delta differs from the client's answer or is shorter.
    """
    overlap = ReplayedAnswer(transcript)
    new = overlap.cut_repeated_part(delta_so_far)
    if not overlap.is_exhausted:
        raise AnswerMismatch
    return new


def compare_answer(transcript: Transcript, delta_so_far: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the part of a delta that the client does not have, and the end of the client's content that it lacks.

    Raises AnswerMismatch if the delta differs from the client's answer.
    """
    overlap = ReplayedAnswer(transcript)
    new, known = overlap.cut_repeated_part(delta_so_far), overlap.unrepeated_content
    if not (known or overlap.is_exhausted):
        raise AnswerMismatch
    return new, known


def _differing_ends(text: str, known: str) -> tuple[str, str]:
    """Return the part of `text` after `known`, and the part of `known` after `text`. At least one is empty.

    Raises AnswerMismatch if neither text begins with the other.
    """
    count = min(len(text), len(known))
    if text[:count] != known[:count]:
        raise AnswerMismatch
    return text[count:], known[count:]
