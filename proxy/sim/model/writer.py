"""The deterministic model of simulated engines.

The next token is a pure function of all tokens before it, so `out(prompt + out[:k]) == out[k:]` holds exactly: a
generation that is resumed anywhere continues as if it had not stopped. A prompt costs one pass of crc32, and each word
costs one decision.

A prompt can contain a script, which the model then follows. It is for programs that let a model use their tools. The
user writes `play: [{"say": "I look.", "calls": [{"name": "Read", "arguments": {"path": "a"}}]}, {"say": "Done."}]`,
with one object for each turn of the model. The script is ignored unless tools are declared, because programs also send
the user's text in requests outside the conversation.
"""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from json import JSONDecodeError, JSONDecoder
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

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
    SPACE,
    SYSTEM,
    THINK,
    THINK_END,
    decode_tokens,
    encode_text,
    pack,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_SCRIPT_CUE: Final = "play: ["
_PACKED_CUE: Final = pack(encode_text(_SCRIPT_CUE))
_TOOL_DECLARATION_START: Final = pack([SYSTEM, *b"tool_declare"])
_ID_BYTES: Final = 4


def rest_of_turn(ids: Sequence[int]) -> list[int] | None:
    """Return the rest of the model's present turn in a script, up to its end; None if the model has no turn."""
    if SYSTEM not in ids:
        return None
    packed = pack(ids)
    if _TOOL_DECLARATION_START not in packed or (found := packed.rfind(_PACKED_CUE)) < 0:
        return None
    start = found // _ID_BYTES
    turns = _parse_turns(ids[start + len(_SCRIPT_CUE) - 1 :])
    told = ids[start:].count(ASSISTANT) - 1
    if not 0 <= told < len(turns):
        return None
    begun = list(ids[len(ids) - 1 - ids[::-1].index(ASSISTANT) :])
    begun = begun[begun.index(MIDDLE) + 1 :]
    calls = sum(len(turn.get("calls") or ()) for turn in turns[:told])
    turn = _write_turn(turns[told], calls, thinks=THINK_END not in begun[:2])
    return turn[len(begun) :] if turn[: len(begun)] == begun else None


def _parse_turns(ids: Sequence[int]) -> list[dict[str, Any]]:
    text = decode_tokens(ids[: ids.index(END)] if END in ids else ids)
    try:
        turns, _ = JSONDecoder(strict=False).raw_decode(text)
    except JSONDecodeError:
        return []
    return [turn for turn in turns if isinstance(turn, dict)]


def _write_turn(turn: dict[str, Any], first_call: int, *, thinks: bool) -> list[int]:
    """Return the tokens of a whole turn, beginning with its reasoning. Kimi numbers the calls of a conversation."""
    ids = [THINK, *(encode_text(turn.get("think") or "I know my part.") if thinks else ()), THINK_END]
    ids += encode_text(turn.get("say") or "")
    if calls := turn.get("calls"):
        ids.append(SECTION_BEGIN)
        for number, call in enumerate(calls, first_call):
            ids += [CALL_BEGIN, *encode_text(f"functions.{call['name']}:{number}"), ARGUMENT_BEGIN]
            ids += [*orjson.dumps(call["arguments"]), CALL_END]
        ids.append(SECTION_END)
    return [*ids, END]


THINKING_TOKENS: Final = 40
"""The minimum number of reasoning tokens. Reasoning ends with the next complete word."""
PREAMBLE_TOKENS: Final = 16
"""The number of content tokens that precede a section of tool calls. `LEADING_WORDS` follows them."""
LEADING_WORDS: Final = b"so:"

_VOCABULARY: Final = tuple(
    (*word.encode(), SPACE)
    for word in (
        "river stone bright morning under seven small lantern carry window slow copper garden north paper quiet winter "
        "follow metal orange distance summer pattern harbor gentle basket thunder silver market yellow corner bridge "
        "café naïve señor über 日本 語 🙂 Ωmega, then however. because, again; first second third"
    ).split()
)
_DECLARATION_HEADER: Final = [*b"tool_declare", MIDDLE]
_RESULT_HEADER: Final = [*b"tool", MIDDLE]
_TOOL_MARKERS: Final = frozenset({CALL_BEGIN, ARGUMENT_BEGIN, SECTION_BEGIN, CALL_END, SECTION_END})


def digest_token_ids(ids: Sequence[int]) -> int:
    """Return the digest of a token sequence. Two engines with the same prompt compute the same digest."""
    return crc32(pack(ids))


class DeterministicWriter:
    """Writes the continuation of a token sequence. Each `next()` returns one token.

    A *decision* is made after every space of plain text and after every marker. The ids since the last decision are
    compared with the text that the writer would have written there, so writing can start in the middle of a word. Tools
    are called if the ids declare them, as by a model that reads its prompt.
    """

    __slots__ = ("_calls", "_eos_after", "_queue", "_hash", "_marker", "_tokens_since_marker", "_tools")

    def __init__(self, ids: Sequence[int], *, eos_after: int | None = None) -> None:
        self._eos_after = eos_after
        self._tools = _declared_tools(ids)
        last_marker = _last_marker(ids)
        decided = _last_decision(ids, last_marker)
        self._marker = ids[last_marker] if last_marker >= 0 else None
        self._tokens_since_marker = decided - last_marker
        self._calls = _calls_since_section(ids) if self._marker in _TOOL_MARKERS else 0
        self._hash = crc32(pack(ids[: decided + 1]))
        self._queue: deque[int] = deque(rest_of_turn(ids) or ())
        if self._queue:
            return
        if tail := tuple(ids[decided + 1 :]):
            self._finish_word(tail)

    def next(self, *, may_end: bool = True) -> int:
        """Return the next token. It is the end-of-turn token only if `may_end`."""
        if not self._queue:
            self._queue_word(self._decide_next_tokens(may_end))
        return self._queue.popleft()

    def _finish_word(self, tail: tuple[int, ...]) -> None:
        word = self._decide_next_tokens(may_end=False)
        if word[: len(tail)] != tail:
            # Not our own words: end this one as soon as possible.
            word = (*tail, word[-1])
        self._queue_word(word)
        for _ in tail:
            self._queue.popleft()

    def _queue_word(self, word: tuple[int, ...]) -> None:
        self._queue.extend(word)
        self._hash = crc32(pack(word), self._hash)
        if word[-1] > 255:
            self._marker = word[-1]
            self._tokens_since_marker = 0
            self._calls += word[-1] == CALL_BEGIN
            if word[-1] == SECTION_BEGIN:
                self._calls = 0
        else:
            self._tokens_since_marker += len(word)

    def _decide_next_tokens(self, may_end: bool) -> tuple[int, ...]:
        marker = self._marker
        if marker == SECTION_BEGIN:
            return (CALL_BEGIN,)
        if marker == CALL_BEGIN:
            name = self._choose_tool(self._calls - 1).get("name", "tool")
            return (*encode_text(f"functions.{name}:{self._calls - 1}"), ARGUMENT_BEGIN)
        if marker == ARGUMENT_BEGIN:
            return (*orjson.dumps(self._make_arguments()), CALL_END)
        if marker == CALL_END:
            return (CALL_BEGIN,) if self._calls < len(self._tools) else (SECTION_END,)
        if marker == THINK and self._tokens_since_marker >= THINKING_TOKENS:
            return (THINK_END,)
        if self._tools and marker in (MIDDLE, THINK_END) and self._tokens_since_marker >= PREAMBLE_TOKENS:
            return (*LEADING_WORDS, SECTION_BEGIN)
        if may_end and self._may_end_here():
            return (END,)
        return self._make_word()

    def _may_end_here(self) -> bool:
        if self._marker == SECTION_END:
            return True
        if self._eos_after is None or self._marker == THINK:
            return False
        if self._marker is None:
            # Plain text has no beginning to count from, so it ends by chance, on average after this number of tokens.
            return (self._hash >> 7) % max(1, self._eos_after // 7) == 0
        return self._tokens_since_marker >= self._eos_after

    def _make_word(self, salt: int = 0) -> tuple[int, ...]:
        return _VOCABULARY[(self._hash * 2654435761 + salt * 40503 >> 13) % len(_VOCABULARY)]

    def _choose_tool(self, index: int) -> dict[str, Any]:
        return self._tools[index % len(self._tools)] if self._tools else {}

    def _make_arguments(self) -> dict[str, str]:
        parameters = self._choose_tool(self._calls - 1).get("parameters") or {}
        names = list(parameters.get("properties") or {})
        return {name: bytes(self._make_word(salt)[:-1]).decode() for salt, name in enumerate(names)}


def _last_marker(ids: Sequence[int]) -> int:
    """Return the index of the last special token; -1 if there is none."""
    if not ids or max(ids) < 256:
        return -1
    return next(index for index in range(len(ids) - 1, -1, -1) if ids[index] > 255)


def _last_decision(ids: Sequence[int], last_marker: int) -> int:
    if last_marker >= 0 and ids[last_marker] in _TOOL_MARKERS - {SECTION_END}:
        return last_marker
    for index in range(len(ids) - 1, last_marker, -1):
        if ids[index] == SPACE:
            return index
    return last_marker


def _calls_since_section(ids: Sequence[int]) -> int:
    calls = 0
    for token in reversed(ids):
        if token == SECTION_BEGIN:
            break
        calls += token == CALL_BEGIN
    return calls


def _declared_tools(ids: Sequence[int]) -> tuple[dict[str, Any], ...]:
    """Return the functions that the prompt declares, at most two; none after a tool's result."""
    tools: tuple[dict[str, Any], ...] = ()
    begin = 0
    for _ in range(ids.count(SYSTEM)):
        begin = ids.index(SYSTEM, begin) + 1
        if list(ids[begin : begin + len(_RESULT_HEADER)]) == _RESULT_HEADER:
            return ()
        if list(ids[begin : begin + len(_DECLARATION_HEADER)]) == _DECLARATION_HEADER:
            tools = _read_functions(takewhile(END.__ne__, ids[begin + len(_DECLARATION_HEADER) :]))
    return tools


def _read_functions(declared: Iterable[int]) -> tuple[dict[str, Any], ...]:
    try:
        return tuple(tool["function"] for tool in orjson.loads(bytes(declared)) if "function" in tool)[:2]
    except (ValueError, TypeError):
        # a declaration in another form
        return ()
