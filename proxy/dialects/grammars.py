"""How families of models write reasoning and tool calls, which continuing their answers needs."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, ClassVar, Final

if TYPE_CHECKING:
    from collections.abc import Sequence


class AnswerParser(ABC):
    """Makes chat deltas of one answer's text, however that is cut, as the engines' parser does."""

    __slots__ = ()

    reads_markers: ClassVar[bool] = True
    """It needs the text with its special tokens, exactly as the model wrote them."""

    @property
    @abstractmethod
    def unsaid(self) -> str:
        """The part of the present text that is read and not yet in a delta, such as half a marker."""

    @property
    @abstractmethod
    def in_tools(self) -> bool:
        """The text so far ends inside the part of an answer that calls tools."""

    @abstractmethod
    def feed(self, text: str, *, finished: bool = False) -> dict[str, Any]:
        """Take the next text and return what it says: an OpenAI chat delta, {} for nothing. `finished`: no text will
        follow.
        """


class Grammar(ABC):
    """How a family of models writes. It is recognised by the prompt, before a model has written anything."""

    reasoning_end_ids: ClassVar[Sequence[int]] = ()
    """Token ids of the markers that end reasoning; empty where they are not known."""
    tools_begin_ids: ClassVar[Sequence[int]] = ()
    """Token ids of the markers that begin tool calls; empty where they are not known."""
    has_tools: ClassVar[bool] = True
    """Its parser reads tool calls."""

    @abstractmethod
    def recognises(self, prompt_tail: Sequence[int]) -> bool:
        """Return whether the last token ids of a prompt are of this family's tokenizer and chat template."""

    @abstractmethod
    def opens_reasoning(self, prompt_tail: str) -> bool | None:
        """Whether an answer behind this end of a prompt begins in reasoning; None: nothing in it tells. Special tokens
        are in the text.
        """

    @abstractmethod
    def parser(
        self, *, in_reasoning: bool, calls_tools: bool, shows_blanks: bool, tells_half_calls: bool, one_call: bool
    ) -> AnswerParser:
        """For one answer. `in_reasoning`: it begins there. `calls_tools`: the request has tools; otherwise their
        markers are text. `shows_blanks`: engines show white space at the end of reasoning and before the first content
        at once. `tells_half_calls`: a call whose name is not complete at the end of the answer is told. `one_call`:
        further ones are not told.
        """


class Verbatim(AnswerParser):
    """The parser of answers whose engines have none: all text is content."""

    __slots__ = ()

    reads_markers = False
    unsaid = ""
    in_tools = False

    def feed(self, text: str, *, finished: bool = False) -> dict[str, Any]:
        """See AnswerParser."""
        return {"content": text} if text or finished else {}


THINK: Final = "<think>"
THINK_END: Final = "</think>"
SECTION_BEGIN: Final = "<|tool_calls_section_begin|>"
SECTION_END: Final = "<|tool_calls_section_end|>"
CALL_BEGIN: Final = "<|tool_call_begin|>"
ARGUMENT_BEGIN: Final = "<|tool_call_argument_begin|>"
CALL_END: Final = "<|tool_call_end|>"
MARKERS: Final = (THINK, THINK_END, SECTION_BEGIN, SECTION_END, CALL_BEGIN, ARGUMENT_BEGIN, CALL_END)

SECTION_BEGIN_ID: Final = 163595
THINK_END_ID: Final = 163607
ASSISTANT_ID: Final = 163588
MIDDLE_ID: Final = 163601
"""The token ids of `SECTION_BEGIN`, `THINK_END`, `<|im_assistant|>` and `<|im_middle|>` in the family's tokenizers."""

_MARKER: Final = re.compile(f"({'|'.join(map(re.escape, MARKERS))})")
_HALF_MARKERS: Final = frozenset(marker[:end] for marker in MARKERS for end in range(1, len(marker)))
_CALL_ID: Final = re.compile(r".+:\d+")


class KimiPhase(Enum):
    """What text is at a place of an answer."""

    REASONING = auto()
    CONTENT = auto()
    SECTION = auto()
    """Inside a tool section, outside a call: text is suppressed."""
    NAME = auto()
    """Between the beginning of a call and that of its arguments: the id, which has the name in it."""
    ARGUMENTS = auto()
    AFTER = auto()
    """Behind a tool section: text is suppressed, but more calls may come."""


# A marker that is not listed for a phase is a piece of text there.
_NEXT: Final = {
    (KimiPhase.REASONING, THINK): KimiPhase.REASONING,
    (KimiPhase.REASONING, THINK_END): KimiPhase.CONTENT,
    (KimiPhase.REASONING, SECTION_BEGIN): KimiPhase.SECTION,
    (KimiPhase.CONTENT, THINK_END): KimiPhase.CONTENT,
    (KimiPhase.CONTENT, SECTION_BEGIN): KimiPhase.SECTION,
    (KimiPhase.SECTION, CALL_BEGIN): KimiPhase.NAME,
    (KimiPhase.SECTION, SECTION_END): KimiPhase.AFTER,
    (KimiPhase.NAME, ARGUMENT_BEGIN): KimiPhase.ARGUMENTS,
    (KimiPhase.ARGUMENTS, CALL_END): KimiPhase.SECTION,
    (KimiPhase.ARGUMENTS, SECTION_END): KimiPhase.AFTER,
    (KimiPhase.AFTER, SECTION_BEGIN): KimiPhase.SECTION,
    (KimiPhase.AFTER, CALL_BEGIN): KimiPhase.NAME,
}


_NEXT_WITHOUT_TOOLS: Final = {key: phase for key, phase in _NEXT.items() if key[1] in (THINK, THINK_END)}


class KimiParser(AnswerParser):
    """Reads one answer, however its text is cut.

    `in_reasoning`: the prompt ends inside reasoning. `calls_tools`: the request has tools, otherwise the markers of
    calls are text. Before vLLM had its parser engine (0.27) it `shows_blanks`: white space at the end of reasoning and
    before the first content, like any text; and not `tells_half_calls`, whose id is not complete at the end of the
    answer. `one_call`: further ones are not told.
    """

    __slots__ = (
        "_calls",
        "_half_marker",
        "_ids_made_up",
        "_is_told",
        "_kept",
        "_next",
        "_one_call",
        "_phase",
        "_shows_blanks",
        "_tells_half_calls",
    )

    def __init__(
        self,
        *,
        in_reasoning: bool,
        calls_tools: bool = True,
        shows_blanks: bool = False,
        tells_half_calls: bool = True,
        one_call: bool = False,
    ) -> None:
        self._phase = KimiPhase.REASONING if in_reasoning else KimiPhase.CONTENT
        self._next = _NEXT if calls_tools else _NEXT_WITHOUT_TOOLS
        self._shows_blanks = shows_blanks
        self._tells_half_calls = tells_half_calls
        self._one_call = one_call
        self._half_marker = ""
        self._kept: list[str] = []  # white space that is shown if text follows, or the id of a call that is not told
        self._calls = 0
        self._is_told = False  # the last call
        self._ids_made_up = 0

    @property
    def phase(self) -> KimiPhase:
        """The part of an answer in which the text so far ends; half a marker at its end does not count."""
        return self._phase

    @property
    def calls(self) -> int:
        """Tool calls that have begun: the index of the next one."""
        return self._calls

    @property
    def unsaid(self) -> str:
        """The part of the present text that is read and not yet in a delta: white space at its end, half a marker."""
        return "".join(self._kept) + self._half_marker

    @property
    def in_tools(self) -> bool:
        """Inside a tool section."""
        return self._phase in (KimiPhase.SECTION, KimiPhase.NAME, KimiPhase.ARGUMENTS)

    def feed(self, text: str, *, finished: bool = False) -> dict[str, Any]:
        """Take the next text and return what it says: an OpenAI chat delta, {} for nothing.

        `reasoning` and `content` are never empty. `tool_calls` has an entry with index, id, type and name for each call
        that opens, and after it entries with index and arguments. What may be half a marker is held back, as is white
        space that is shown only if text follows. `finished`: no text will follow.
        """
        text = self._half_marker + text
        tail = text[text.rfind("<") :] if "<" in text else ""
        self._half_marker = tail if tail in _HALF_MARKERS else ""
        said: dict[str, list[Any]] = {}
        run = []
        for piece in _MARKER.split(text[: len(text) - len(self._half_marker)]):
            following = self._next.get((self._phase, piece))
            if following is None:
                run.append(piece)
            else:
                self._take("".join(run), said)
                self._enter(following, said)
                run.clear()
        self._take("".join(run), said)
        if finished:
            self._finish(said)
        if self._one_call and "tool_calls" in said:
            said["tool_calls"] = [part for part in said["tool_calls"] if part["index"] == 0]
        return {name: parts if name == "tool_calls" else "".join(parts) for name, parts in said.items() if parts}

    def _take(self, text: str, said: dict[str, list[Any]]) -> None:
        """Text of the present phase."""
        if not text:
            return
        match self._phase:
            case KimiPhase.REASONING:
                shown = text if self._shows_blanks else text.rstrip()
                if shown:
                    said.setdefault("reasoning", []).extend((*self._kept, shown))
                    self._kept.clear()
                self._kept.append(text[len(shown) :])
            case KimiPhase.CONTENT:
                self._kept.append(text)
                if self._shows_blanks or not text.isspace():
                    self._shows_blanks = True  # only those before the first content are doubtful
                    self._show_kept(said)
            case KimiPhase.NAME:
                self._kept.append(text)
            case KimiPhase.ARGUMENTS if self._is_told:
                part = {"index": self._calls - 1, "function": {"arguments": text}}
                said.setdefault("tool_calls", []).append(part)
            case KimiPhase.ARGUMENTS:
                self._kept.clear()  # an id of another form hides a call that has arguments
            case KimiPhase.SECTION | KimiPhase.AFTER:
                pass

    def _enter(self, phase: KimiPhase, said: dict[str, list[Any]]) -> None:
        match phase:
            case KimiPhase.CONTENT | KimiPhase.SECTION if self._phase is KimiPhase.REASONING:
                self._kept.clear()
            case KimiPhase.NAME:
                self._kept.clear()
                self._calls += 1
                self._is_told = False
            case KimiPhase.ARGUMENTS:
                self._open(said)
            case KimiPhase.SECTION | KimiPhase.AFTER if self._phase is KimiPhase.ARGUMENTS:
                self._close(said)
        self._phase = phase

    def _open(self, said: dict[str, list[Any]]) -> None:
        """Tell the call if what stands before its arguments is an id."""
        match = _CALL_ID.match("".join(self._kept).strip())
        name = match[0].split(":")[0].removeprefix("functions.") if match else ""
        if match and name:
            self._tell(match[0], name, said)

    def _close(self, said: dict[str, list[Any]]) -> None:
        """Without arguments anything is the name of a call, and vLLM makes up an id. So it does for half an id too."""
        name = "".join(self._kept)
        if name:
            self._tell(f"functions.{name}:{self._ids_made_up}", name, said)
            self._ids_made_up += 1

    def _tell(self, call_id: str, name: str, said: dict[str, list[Any]]) -> None:
        function = {"name": name, "arguments": ""}
        opener = {"index": self._calls - 1, "id": call_id, "type": "function", "function": function}
        said.setdefault("tool_calls", []).append(opener)
        self._kept.clear()
        self._is_told = True

    def _finish(self, said: dict[str, list[Any]]) -> None:
        half_marker, self._half_marker = self._half_marker, ""
        if self._phase is KimiPhase.REASONING:
            self._kept.clear()  # as vLLM does, even if half a marker follows
        self._take(half_marker, said)
        match self._phase:
            case KimiPhase.CONTENT | KimiPhase.SECTION | KimiPhase.AFTER:
                self._show_kept(said)
            case KimiPhase.NAME if self._tells_half_calls:
                self._open(said)
                self._close(said)
            case KimiPhase.ARGUMENTS:
                self._close(said)

    def _show_kept(self, said: dict[str, list[Any]]) -> None:
        if self._kept:
            said.setdefault("content", []).extend(self._kept)
            self._kept.clear()


class Kimi(Grammar):
    """See Grammar."""

    reasoning_end_ids = (THINK_END_ID, SECTION_BEGIN_ID)
    tools_begin_ids = (SECTION_BEGIN_ID,)

    def recognises(self, prompt_tail: Sequence[int]) -> bool:
        """The header of the assistant's turn is `<|im_assistant|>assistant<|im_middle|>`."""
        return ASSISTANT_ID in prompt_tail and MIDDLE_ID in prompt_tail

    def opens_reasoning(self, prompt_tail: str) -> bool | None:
        """See Grammar. The nearest marker decides (vLLM `ParserEngine.is_reasoning_end`)."""
        opened = prompt_tail.rfind(THINK)
        closed = max(prompt_tail.rfind(THINK_END), prompt_tail.rfind(SECTION_BEGIN))
        return None if opened == closed else opened > closed

    def parser(
        self, *, in_reasoning: bool, calls_tools: bool, shows_blanks: bool, tells_half_calls: bool, one_call: bool
    ) -> KimiParser:
        """See Grammar."""
        return KimiParser(
            in_reasoning=in_reasoning,
            calls_tools=calls_tools,
            shows_blanks=shows_blanks,
            tells_half_calls=tells_half_calls,
            one_call=one_call,
        )


class ThinkTags(Grammar):
    """Reasoning stands, if anywhere, between the tags of most models.

    There are no token ids, which are different ones in each tokenizer, and no tool calls. What a client has is compared
    with what this makes of the answer, so a model that writes otherwise is not continued as a completion; it is never
    continued wrongly.
    """

    has_tools = False

    def recognises(self, prompt_tail: Sequence[int]) -> bool:
        """Everything."""
        return True

    def opens_reasoning(self, prompt_tail: str) -> bool | None:
        """See Grammar. The nearest tag decides."""
        opened, closed = prompt_tail.rfind(THINK), prompt_tail.rfind(THINK_END)
        return None if opened == closed else opened > closed

    def parser(
        self, *, in_reasoning: bool, calls_tools: bool, shows_blanks: bool, tells_half_calls: bool, one_call: bool
    ) -> AnswerParser:
        """See Grammar. Between these tags the Kimi K2 family reasons, too."""
        return KimiParser(in_reasoning=in_reasoning, calls_tools=False, shows_blanks=shows_blanks)


GRAMMARS: Final[Sequence[Grammar]] = (Kimi(),)
"""The first that recognises the prompt is the answer's."""

UNRECOGNISED: Final = ThinkTags()

PROMPT_TAIL_TOKENS: Final = 64
"""Tokens at the end of a prompt that have the header of the assistant's turn, also with long templates."""
# They are that long if a tokenizer has 2**32 ids, and each is written behind a comma and a space.
_PROMPT_TAIL_BYTES: Final = 12 * PROMPT_TAIL_TOKENS

_numbers: Final = re.compile(rb"[0-9]+").findall


def grammar_of(prompt_ids: bytes | None) -> Grammar:
    """The grammar of the answer to this prompt: its token ids, a JSON array; None where they are not known."""
    if prompt_ids is None:
        return UNRECOGNISED
    tail = [int(number) for number in _numbers(prompt_ids[-_PROMPT_TAIL_BYTES:])[-PROMPT_TAIL_TOKENS:]]
    return next((grammar for grammar in GRAMMARS if grammar.recognises(tail)), UNRECOGNISED)
