"""A part that is written out in the prompt, which the model then plays: for programs that let a model use their tools.

A user says `play: [{"say": "I look.", "calls": [{"name": "Read", "arguments": {"path": "a"}}]}, {"say": "Done."}]`, one
object for each of the model's turns from there on. It is played only where tools are declared, since programs ask about
what a user said beside the conversation, too. What comes next is a function of the ids alone, as everywhere.
"""

from __future__ import annotations

from json import JSONDecodeError, JSONDecoder
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.sim.model.tokenizer import (
    ARGUMENT_BEGIN,
    ASSISTANT,
    CALL_BEGIN,
    CALL_END,
    END,
    MIDDLE,
    SECTION_BEGIN,
    SECTION_END,
    SYSTEM,
    THINK,
    THINK_END,
    decode,
    encode,
    pack,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_CUE: Final = "play: ["
_PACKED_CUE: Final = pack(encode(_CUE))
_TOOLS: Final = pack([SYSTEM, *b"tool_declare"])
_ID_BYTES: Final = 4


def rest_of_turn(ids: Sequence[int]) -> list[int] | None:
    """What the model has yet to say in its present turn, up to the end of it; None where it has no part to play."""
    if SYSTEM not in ids:
        return None
    packed = pack(ids)
    if _TOOLS not in packed or (found := packed.rfind(_PACKED_CUE)) < 0:
        return None
    start = found // _ID_BYTES
    turns = _turns(ids[start + len(_CUE) - 1 :])
    told = ids[start:].count(ASSISTANT) - 1
    if not 0 <= told < len(turns):
        return None
    begun = list(ids[len(ids) - 1 - ids[::-1].index(ASSISTANT) :])
    begun = begun[begun.index(MIDDLE) + 1 :]
    calls = sum(len(turn.get("calls") or ()) for turn in turns[:told])
    turn = _written(turns[told], calls, thinks=THINK_END not in begun[:2])
    return turn[len(begun) :] if turn[: len(begun)] == begun else None


def _turns(ids: Sequence[int]) -> list[dict[str, Any]]:
    text = decode(ids[: ids.index(END)] if END in ids else ids)
    try:
        turns, _ = JSONDecoder(strict=False).raw_decode(text)
    except JSONDecodeError:
        return []
    return [turn for turn in turns if isinstance(turn, dict)]


def _written(turn: dict[str, Any], first_call: int, *, thinks: bool) -> list[int]:
    """All of a turn, from where its reasoning begins or would. Kimi numbers the calls of a conversation."""
    ids = [THINK, *(encode(turn.get("think") or "I know my part.") if thinks else ()), THINK_END]
    ids += encode(turn.get("say") or "")
    if calls := turn.get("calls"):
        ids.append(SECTION_BEGIN)
        for number, call in enumerate(calls, first_call):
            ids += [CALL_BEGIN, *encode(f"functions.{call['name']}:{number}"), ARGUMENT_BEGIN]
            ids += [*orjson.dumps(call["arguments"]), CALL_END]
        ids.append(SECTION_END)
    return [*ids, END]
