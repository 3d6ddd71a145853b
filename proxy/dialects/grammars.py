"""How each family of models writes reasoning and tool calls. Without a Grammar an answer is not continued.

A Grammar has no state and does no IO; an AnswerParser is the state of one answer. Each family has one Grammar.
ThinkTagsGrammar is the Grammar of all models that no other Grammar recognises.

The Kimi K2 family puts reasoning, content and tool calls between markers:

    reasoning</think>content<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>
    {"query": "…"}<|tool_call_end|><|tool_calls_section_end|>

KimiParser follows vLLM's streaming parser (0.32, `parser/kimi_k2.py` and `parser/engine/`). After every token it has
returned at least the text that vLLM has sent, and at the end exactly that text. It differs in three ways:

* A marker that the model spelled out in ordinary tokens is a marker, because only the text is known here.
* Special tokens that are no markers are text.
* A call with arguments but without a proper id is not reported, even if a member "name" of its arguments makes vLLM
  report one.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, ClassVar, Final

if TYPE_CHECKING:
    from collections.abc import Sequence


class AnswerParser(ABC):
    """Converts the text of one answer to chat deltas, as the engines' parser does. The text may be cut anywhere."""

    __slots__ = ()

    reads_markers: ClassVar[bool] = True
    """Whether the parser needs the text with its special tokens, exactly as the model wrote it."""

    @property
    @abstractmethod
    def held_text(self) -> str:
        """The text that was read but is not in a delta yet, such as the first half of a marker."""

    @property
    @abstractmethod
    def is_in_tool_section(self) -> bool:
        """Whether the text so far ends inside the section of tool calls."""

    @abstractmethod
    def parse_text(self, text: str, *, finished: bool = False) -> dict[str, Any]:
        """Read more text and return its OpenAI chat delta; {} if there is none.

        `finished`: this is the end of the text.
        """


class Grammar(ABC):
    """The markers of one family of models. The family is recognised by the end of the prompt."""

    reasoning_end_ids: ClassVar[Sequence[int]] = ()
    """Token ids of the markers that end reasoning; empty if they are not known."""
    tools_begin_ids: ClassVar[Sequence[int]] = ()
    """Token ids of the markers that begin tool calls; empty if they are not known."""
    has_tools: ClassVar[bool] = True
    """Whether the parser of this family reads tool calls."""

    @abstractmethod
    def recognises(self, prompt_tail: Sequence[int]) -> bool:
        """Return whether these last token ids of a prompt come from this family's tokenizer and chat template."""

    @abstractmethod
    def begins_with_reasoning(self, prompt_tail: str) -> bool | None:
        """Return whether the answer to this prompt begins with reasoning; None if the text has no marker.

        Args:
            prompt_tail: The text of the end of the prompt, with special tokens.
        """

    @abstractmethod
    def make_parser(
        self, *, in_reasoning: bool, calls_tools: bool, shows_blanks: bool, reports_half_calls: bool, one_call: bool
    ) -> AnswerParser:
        """Return the parser of one answer.

        Args:
            in_reasoning: Whether the answer begins in reasoning.
            calls_tools: Whether the request has tools. Otherwise the markers of tool calls are text.
            shows_blanks: Whether white space is sent at once at the end of reasoning and before the first content.
            reports_half_calls: Whether a call whose name is incomplete at the end of the answer is reported.
            one_call: Whether only the first call is reported.
        """


class VerbatimParser(AnswerParser):
    """The parser for engines that have no parser: it returns all text as content."""

    __slots__ = ()

    reads_markers = False
    held_text = ""
    is_in_tool_section = False

    def parse_text(self, text: str, *, finished: bool = False) -> dict[str, Any]:
        return {"content": text} if text or finished else {}


THINK_BEGIN: Final = "<think>"
THINK_END: Final = "</think>"
SECTION_BEGIN: Final = "<|tool_calls_section_begin|>"
SECTION_END: Final = "<|tool_calls_section_end|>"
CALL_BEGIN: Final = "<|tool_call_begin|>"
ARGUMENT_BEGIN: Final = "<|tool_call_argument_begin|>"
CALL_END: Final = "<|tool_call_end|>"
MARKERS: Final = (THINK_BEGIN, THINK_END, SECTION_BEGIN, SECTION_END, CALL_BEGIN, ARGUMENT_BEGIN, CALL_END)

SECTION_BEGIN_ID: Final = 163595
THINK_END_ID: Final = 163607
ASSISTANT_ID: Final = 163588
MESSAGE_MIDDLE_ID: Final = 163601
"""The token ids of `SECTION_BEGIN`, `THINK_END`, `<|im_assistant|>` and `<|im_middle|>` in the family's tokenizers."""

_MARKER_PATTERN: Final = re.compile(f"({'|'.join(map(re.escape, MARKERS))})")
_MARKER_PREFIXES: Final = frozenset(marker[:end] for marker in MARKERS for end in range(1, len(marker)))
_CALL_ID_PATTERN: Final = re.compile(r".+:\d+")


class KimiPhase(Enum):
    """The section of an answer in which a piece of text stands."""

    REASONING = auto()
    CONTENT = auto()
    TOOL_SECTION = auto()
    """Inside a tool section and outside a call. Text here is dropped."""
    TOOL_NAME = auto()
    """Inside a call and before its arguments: the text is the id of the call, which contains its name."""
    TOOL_ARGUMENTS = auto()
    AFTER_TOOL_SECTION = auto()
    """After a tool section. Text here is dropped, but more calls may follow."""


# In a phase for which a marker is not listed, the marker is text.
_NEXT_MARKERS: Final = {
    (KimiPhase.REASONING, THINK_BEGIN): KimiPhase.REASONING,
    (KimiPhase.REASONING, THINK_END): KimiPhase.CONTENT,
    (KimiPhase.REASONING, SECTION_BEGIN): KimiPhase.TOOL_SECTION,
    (KimiPhase.CONTENT, THINK_END): KimiPhase.CONTENT,
    (KimiPhase.CONTENT, SECTION_BEGIN): KimiPhase.TOOL_SECTION,
    (KimiPhase.TOOL_SECTION, CALL_BEGIN): KimiPhase.TOOL_NAME,
    (KimiPhase.TOOL_SECTION, SECTION_END): KimiPhase.AFTER_TOOL_SECTION,
    (KimiPhase.TOOL_NAME, ARGUMENT_BEGIN): KimiPhase.TOOL_ARGUMENTS,
    (KimiPhase.TOOL_ARGUMENTS, CALL_END): KimiPhase.TOOL_SECTION,
    (KimiPhase.TOOL_ARGUMENTS, SECTION_END): KimiPhase.AFTER_TOOL_SECTION,
    (KimiPhase.AFTER_TOOL_SECTION, SECTION_BEGIN): KimiPhase.TOOL_SECTION,
    (KimiPhase.AFTER_TOOL_SECTION, CALL_BEGIN): KimiPhase.TOOL_NAME,
}


_NEXT_MARKERS_WITHOUT_TOOLS: Final = {
    key: phase for key, phase in _NEXT_MARKERS.items() if key[1] in (THINK_BEGIN, THINK_END)
}


class KimiParser(AnswerParser):
    """Reads one answer of the Kimi K2 family. The text may be cut anywhere.

    See Grammar.make_parser for the parameters. Before vLLM 0.27, which introduced its parser engine, vLLM behaved as
    with `shows_blanks` and without `reports_half_calls`.
    """

    __slots__ = (
        "_call_count",
        "_half_marker",
        "_made_up_id_count",
        "_is_call_reported",
        "_kept_text",
        "_next_markers",
        "_one_call",
        "_phase",
        "_shows_blanks",
        "_reports_half_calls",
    )

    def __init__(
        self,
        *,
        in_reasoning: bool,
        calls_tools: bool = True,
        shows_blanks: bool = False,
        reports_half_calls: bool = True,
        one_call: bool = False,
    ) -> None:
        self._phase = KimiPhase.REASONING if in_reasoning else KimiPhase.CONTENT
        self._next_markers = _NEXT_MARKERS if calls_tools else _NEXT_MARKERS_WITHOUT_TOOLS
        self._shows_blanks = shows_blanks
        self._reports_half_calls = reports_half_calls
        self._one_call = one_call
        self._half_marker = ""
        self._kept_text: list[str] = []
        """White space that is sent only if text follows, or the id of a call that is not reported yet."""
        self._call_count = 0
        self._is_call_reported = False
        """Whether the last tool call was reported."""
        self._made_up_id_count = 0

    @property
    def phase(self) -> KimiPhase:
        """The section in which the text so far ends. An incomplete marker at the end does not count."""
        return self._phase

    @property
    def call_count(self) -> int:
        """The number of tool calls that have begun. The next call gets this index."""
        return self._call_count

    @property
    def held_text(self) -> str:
        """The text that was read but is not in a delta yet: white space at the end, or an incomplete marker."""
        return "".join(self._kept_text) + self._half_marker

    @property
    def is_in_tool_section(self) -> bool:
        """Whether the text so far ends inside a tool section."""
        return self._phase in (KimiPhase.TOOL_SECTION, KimiPhase.TOOL_NAME, KimiPhase.TOOL_ARGUMENTS)

    def parse_text(self, text: str, *, finished: bool = False) -> dict[str, Any]:
        """Read more text and return its OpenAI chat delta; {} if there is none. `finished`: the text ends here.

        `reasoning` and `content` are never empty. `tool_calls` has an entry with index, id, type and name for each call
        that opens, and after it entries with index and arguments. Text that may be the beginning of a marker is held
        back, and so is white space that is sent only if text follows.
        """
        text = self._half_marker + text
        tail = text[text.rfind("<") :] if "<" in text else ""
        self._half_marker = tail if tail in _MARKER_PREFIXES else ""
        pieces: dict[str, list[Any]] = {}
        run = []
        for piece in _MARKER_PATTERN.split(text[: len(text) - len(self._half_marker)]):
            following = self._next_markers.get((self._phase, piece))
            if following is None:
                run.append(piece)
            else:
                self._consume_text("".join(run), pieces)
                self._enter_phase(following, pieces)
                run.clear()
        self._consume_text("".join(run), pieces)
        if finished:
            self._finish_answer(pieces)
        if self._one_call and "tool_calls" in pieces:
            pieces["tool_calls"] = [part for part in pieces["tool_calls"] if part["index"] == 0]
        return {name: parts if name == "tool_calls" else "".join(parts) for name, parts in pieces.items() if parts}

    def _consume_text(self, text: str, pieces: dict[str, list[Any]]) -> None:
        """Add text of the current phase to the delta."""
        if not text:
            return
        match self._phase:
            case KimiPhase.REASONING:
                shown = text if self._shows_blanks else text.rstrip()
                if shown:
                    pieces.setdefault("reasoning", []).extend((*self._kept_text, shown))
                    self._kept_text.clear()
                self._kept_text.append(text[len(shown) :])
            case KimiPhase.CONTENT:
                self._kept_text.append(text)
                if self._shows_blanks or not text.isspace():
                    self._shows_blanks = True  # only white space before the first content is held back
                    self._release_kept_text(pieces)
            case KimiPhase.TOOL_NAME:
                self._kept_text.append(text)
            case KimiPhase.TOOL_ARGUMENTS if self._is_call_reported:
                part = {"index": self._call_count - 1, "function": {"arguments": text}}
                pieces.setdefault("tool_calls", []).append(part)
            case KimiPhase.TOOL_ARGUMENTS:
                self._kept_text.clear()  # a call with arguments and a malformed id is not reported
            case KimiPhase.TOOL_SECTION | KimiPhase.AFTER_TOOL_SECTION:
                pass

    def _enter_phase(self, phase: KimiPhase, pieces: dict[str, list[Any]]) -> None:
        match phase:
            case KimiPhase.CONTENT | KimiPhase.TOOL_SECTION if self._phase is KimiPhase.REASONING:
                self._kept_text.clear()
            case KimiPhase.TOOL_NAME:
                self._kept_text.clear()
                self._call_count += 1
                self._is_call_reported = False
            case KimiPhase.TOOL_ARGUMENTS:
                self._begin_call(pieces)
            case KimiPhase.TOOL_SECTION | KimiPhase.AFTER_TOOL_SECTION if self._phase is KimiPhase.TOOL_ARGUMENTS:
                self._end_call(pieces)
        self._phase = phase

    def _begin_call(self, pieces: dict[str, list[Any]]) -> None:
        """Report a tool call if the text before its arguments is a valid id."""
        match = _CALL_ID_PATTERN.match("".join(self._kept_text).strip())
        name = match[0].split(":")[0].removeprefix("functions.") if match else ""
        if match and name:
            self._report_call(match[0], name, pieces)

    def _end_call(self, pieces: dict[str, list[Any]]) -> None:
        """Report a call without arguments whose text is no id. The text becomes the name, and the id is made up.

        vLLM does the same. Before vLLM 0.27, such a call was not reported.
        """
        name = "".join(self._kept_text)
        if name and self._reports_half_calls:
            self._report_call(f"functions.{name}:{self._made_up_id_count}", name, pieces)
            self._made_up_id_count += 1
        self._kept_text.clear()

    def _report_call(self, call_id: str, name: str, pieces: dict[str, list[Any]]) -> None:
        function = {"name": name, "arguments": ""}
        opener = {"index": self._call_count - 1, "id": call_id, "type": "function", "function": function}
        pieces.setdefault("tool_calls", []).append(opener)
        self._kept_text.clear()
        self._is_call_reported = True

    def _finish_answer(self, pieces: dict[str, list[Any]]) -> None:
        half_marker, self._half_marker = self._half_marker, ""
        if self._phase is KimiPhase.REASONING:
            self._kept_text.clear()  # as vLLM does, even if half a marker follows
        self._consume_text(half_marker, pieces)
        match self._phase:
            case KimiPhase.CONTENT | KimiPhase.TOOL_SECTION | KimiPhase.AFTER_TOOL_SECTION:
                self._release_kept_text(pieces)
            case KimiPhase.TOOL_NAME if self._reports_half_calls:
                self._begin_call(pieces)
                self._end_call(pieces)
            case KimiPhase.TOOL_ARGUMENTS:
                self._end_call(pieces)

    def _release_kept_text(self, pieces: dict[str, list[Any]]) -> None:
        if self._kept_text:
            pieces.setdefault("content", []).extend(self._kept_text)
            self._kept_text.clear()


class KimiGrammar(Grammar):
    """The Kimi K2 family."""

    reasoning_end_ids = (THINK_END_ID, SECTION_BEGIN_ID)
    tools_begin_ids = (SECTION_BEGIN_ID,)

    def recognises(self, prompt_tail: Sequence[int]) -> bool:
        """Look for the header of the assistant's turn: `<|im_assistant|>assistant<|im_middle|>`."""
        return ASSISTANT_ID in prompt_tail and MESSAGE_MIDDLE_ID in prompt_tail

    def begins_with_reasoning(self, prompt_tail: str) -> bool | None:
        """Decide by the last marker in the prompt (vLLM `ParserEngine.is_reasoning_end`)."""
        opened = prompt_tail.rfind(THINK_BEGIN)
        closed = max(prompt_tail.rfind(THINK_END), prompt_tail.rfind(SECTION_BEGIN))
        return None if opened == closed else opened > closed

    def make_parser(
        self, *, in_reasoning: bool, calls_tools: bool, shows_blanks: bool, reports_half_calls: bool, one_call: bool
    ) -> KimiParser:
        return KimiParser(
            in_reasoning=in_reasoning,
            calls_tools=calls_tools,
            shows_blanks=shows_blanks,
            reports_half_calls=reports_half_calls,
            one_call=one_call,
        )


class ThinkTagsGrammar(Grammar):
    """The grammar of models with reasoning between `<think>` and `</think>`, and of all models that are not recognised.

    Token ids are not known, because each tokenizer has different ones, and tool calls are not read. The client's text
    is compared with the parsed answer. So an answer with other markers is not continued as a completion,
    but it is never continued wrongly.
    """

    has_tools = False

    def recognises(self, prompt_tail: Sequence[int]) -> bool:
        """Return True for any prompt."""
        return True

    def begins_with_reasoning(self, prompt_tail: str) -> bool | None:
        """Decide by the last tag in the prompt."""
        opened, closed = prompt_tail.rfind(THINK_BEGIN), prompt_tail.rfind(THINK_END)
        return None if opened == closed else opened > closed

    def make_parser(
        self, *, in_reasoning: bool, calls_tools: bool, shows_blanks: bool, reports_half_calls: bool, one_call: bool
    ) -> AnswerParser:
        """Return the parser of the Kimi K2 family, which uses the same tags for reasoning."""
        return KimiParser(in_reasoning=in_reasoning, calls_tools=False, shows_blanks=shows_blanks)


GRAMMARS: Final[Sequence[Grammar]] = (KimiGrammar(),)
"""The known grammars. The first that recognises the prompt is used."""

UNRECOGNISED_GRAMMAR: Final = ThinkTagsGrammar()

PROMPT_TAIL_TOKENS: Final = 64
"""How many tokens at the end of a prompt are sure to include the header of the assistant's turn."""
# Their maximum length: each id has at most ten digits, and a comma and a space before it.
_PROMPT_TAIL_BYTES: Final = 12 * PROMPT_TAIL_TOKENS

_random_numbers: Final = re.compile(rb"[0-9]+").findall


def recognise_grammar(prompt_ids: bytes | None) -> Grammar:
    """Return the grammar of the answer to a prompt. `prompt_ids`: a JSON array of token ids; None if not known."""
    if prompt_ids is None:
        return UNRECOGNISED_GRAMMAR
    tail = [int(number) for number in _random_numbers(prompt_ids[-_PROMPT_TAIL_BYTES:])[-PROMPT_TAIL_TOKENS:]]
    return next((grammar for grammar in GRAMMARS if grammar.recognises(tail)), UNRECOGNISED_GRAMMAR)
