"""Collects the client's answer over the streams of all decoders: the facts that the next decoder needs. No IO."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from proxy.dialects.grammars import UNRECOGNISED_GRAMMAR, Grammar, recognise_grammar
from proxy.wire.chat_members import ToolCall, ToolCalls, UnreadableMember, read_objects, read_text
from proxy.wire.python_json import encode_utf8, replace_surrogates

if TYPE_CHECKING:
    from collections.abc import Sequence


class Transcript:
    """The answer of one choice so far: the client's text and its token ids."""

    def __init__(self, reasoning_field: str = "reasoning") -> None:
        """Create an empty transcript. `reasoning_field`: the engine's name for reasoning, until the answer shows it."""
        self.prompt_ids: bytes | None = None
        """The prompt's token ids, a JSON array; None until an engine reports them."""
        self.began_in_reasoning = False
        self.reasoning_field = reasoning_field
        """Name of the delta member that has reasoning."""
        self._calls: ToolCalls | None = None
        self.tools: Sequence[ToolCall] = ()
        """The tool calls, in the order in which they began."""
        self._ids = array("I")
        self._shown_count = 0
        self._chunk_start = 0
        self._reasoning_ids = 0
        self._reasoning_ids_before_chunk = 0  # `count_reasoning_ids` before the last chunk of reasoning
        self._text_offsets: list[int] | None = None
        """Offsets of the ids in the text, from a completion's log probabilities; None until an engine has sent some."""
        self._offset_end = 0
        self._grammar: Grammar | None = None  # once it was asked for
        # UTF-8. An io.StringIO of Python 3.11 keeps what it is given, which is ten times as much.
        self._reasoning = bytearray()
        self._content = bytearray()
        self._texts: list[str] | None = None
        """Texts of noted tokens that are not added yet; None until `token_lists` was called.

        It is always the same list.
        """
        self._noted_ids: list[int] | None = None
        self._is_reasoning = False

    # Properties settle first, so that noted tokens are included.

    @property
    def ids(self) -> array[int]:
        """The token ids of the answer so far."""
        self.settle_noted_tokens()
        return self._ids

    @property
    def count_shown_ids(self) -> int:
        """The number of ids whose text was shown.

        Later ids have shown nothing yet: a marker, the beginning of a tool call, or bytes of an incomplete character.
        """
        self.settle_noted_tokens()
        return self._shown_count

    @property
    def first_id_of_chunk(self) -> int:
        """The number of ids before the last chunk that showed any text."""
        self.settle_noted_tokens()
        return self._chunk_start

    @property
    def count_reasoning_ids(self) -> int:
        """The number of ids that belong to reasoning."""
        self.settle_noted_tokens()
        return self._reasoning_ids

    @property
    def reasoning_text(self) -> str:
        self.settle_noted_tokens()
        return replace_surrogates(self._reasoning)

    @property
    def content_text(self) -> str:
        """The content of a chat, or the text of a completion."""
        self.settle_noted_tokens()
        return replace_surrogates(self._content)

    @property
    def prompt_tokens(self) -> int | None:
        """The number of token ids in the prompt; None until an engine reports them."""
        ids = self.prompt_ids
        return None if ids is None else ids.count(b",") + bool(ids.strip(b"[] \t\r\n"))

    @property
    def grammar(self) -> Grammar:
        """The grammar of the model, which is recognised by the prompt."""
        if self._grammar is None:
            if self.prompt_ids is None:
                return UNRECOGNISED_GRAMMAR
            self._grammar = recognise_grammar(self.prompt_ids)
        return self._grammar

    @property
    def has_text(self) -> bool:
        """Whether the answer has anything that a client can see."""
        return bool(self._texts or self._content or self._reasoning or self.tools)

    def add_choice(self, choice: dict[str, Any], ids: Any) -> bool:
        """Add the choice of one chunk. Return whether the chunk shows anything. Raises UnreadableMember.

        `ids`: the value of the engine's member for token ids, which may have any type.
        """
        if self._texts:
            self.settle_noted_tokens()
        before = len(self._ids)
        if ids:
            try:
                self._ids.extend(ids)
                if choice.get("logprobs") is not None and (offsets := choice["logprobs"].get("text_offset")):
                    if self._text_offsets is None:
                        self._text_offsets = []
                    self._text_offsets += offsets[-len(ids) :]
                    self._offset_end = offsets[-1] + len(choice["logprobs"]["tokens"][-1])
            except (AttributeError, LookupError, OverflowError, TypeError):
                raise UnreadableMember("token_ids or logprobs are not those of tokens") from None
        delta = choice.get("delta")
        if delta is None:
            text = choice.get("text")
            if not text:
                return False
            try:
                self._content += text.encode()
            except (AttributeError, UnicodeEncodeError):
                self._content += encode_utf8(read_text(text, "text"))
        elif delta.__class__ is not dict:  # to ask isinstance would be a call for each token
            raise UnreadableMember("delta is not an object")
        elif not self._add_delta(delta, before):
            return False
        self._chunk_start = before
        self._shown_count = len(self._ids)
        return True

    def token_lists(self, *, is_reasoning: bool) -> tuple[list[str], list[int]]:
        """Return lists for the texts and the ids of tokens that all add to the same text.

        The caller must call `settle_noted_tokens` regularly, because noted tokens take many times the memory of added
        ones.
        """
        self.settle_noted_tokens()
        self._is_reasoning = is_reasoning
        texts, ids = self._texts, self._noted_ids
        if texts is None or ids is None:
            texts, ids = self._texts, self._noted_ids = [], []
        return texts, ids

    def settle_noted_tokens(self) -> None:
        """Add the tokens that were only noted so far to the answer."""
        texts = self._texts
        if not texts:
            return
        is_reasoning = self._is_reasoning
        written = self._reasoning if is_reasoning else self._content
        written += encode_utf8("".join(texts))
        has_several = len(texts) > 1
        texts.clear()
        noted = self._noted_ids
        if not noted:
            return
        ids = self._ids
        ids.fromlist(noted)
        noted.clear()
        before = len(ids) - 1
        if is_reasoning:
            self._reasoning_ids_before_chunk = before if has_several else self._reasoning_ids
            self._reasoning_ids = len(ids)
        self._chunk_start, self._shown_count = before, len(ids)

    def text_offset_after(self, kept: int) -> int | None:
        """Return the offset in the text at which the first `kept` ids end; None without log probabilities."""
        offsets = self._text_offsets or ()
        if len(offsets) != len(self.ids):
            return None
        return offsets[kept] if kept < len(offsets) else self._offset_end

    def count_reasoning_among(self, kept: int) -> int:
        """Return the number of the first `kept` ids that are reasoning."""
        self.settle_noted_tokens()
        is_past_reasoning = bool(self._content or self.tools) or not self._reasoning
        return min(
            kept,
            self._reasoning_ids
            if is_past_reasoning
            else self._index_of_end_marker(self._reasoning_ids_before_chunk, kept),
        )

    def estimate_usage(self) -> dict[str, Any] | None:
        """Return the usage of the answer, counted from its token ids; None if engines do not report them."""
        prompt, completion = self.prompt_tokens, len(self.ids)
        if prompt is None or (not completion and self.has_text):
            return None
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    def truncate_to_ids(self, kept: int) -> None:
        """Remove the answer's token ids after the first `kept` ids."""
        self._reasoning_ids = self.count_reasoning_among(kept)
        if self._text_offsets is not None and kept < len(self._text_offsets):
            self._offset_end = self._text_offsets[kept]
            del self._text_offsets[kept:]
        del self._ids[kept:]
        self._shown_count = self._chunk_start = kept

    def _add_delta(self, delta: dict[str, Any], before: int) -> bool:
        shows = False
        if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
            if not self.has_text:
                self.began_in_reasoning = True
                self.reasoning_field = "reasoning" if "reasoning" in delta else "reasoning_content"
            try:
                self._reasoning += reasoning.encode()
            except (AttributeError, UnicodeEncodeError):
                self._reasoning += encode_utf8(read_text(reasoning, "reasoning"))
            self._reasoning_ids_before_chunk = self._reasoning_ids
            self._reasoning_ids = self._index_of_end_marker(before, len(self._ids))
            shows = True
        if content := delta.get("content"):
            if self._reasoning and not self._content:
                self._end_reasoning(before)
            try:
                self._content += content.encode()
            except (AttributeError, UnicodeEncodeError):
                self._content += encode_utf8(read_text(content, "content"))
            shows = True
        if calls := delta.get("tool_calls"):
            if self._reasoning and not self._content and not self.tools:
                self._end_reasoning(before)
            if self._calls is None:
                self._calls = ToolCalls()
                self.tools = self._calls.calls
            for part in read_objects(calls, "tool_calls"):
                self._calls.add_fragment(part)
            shows = True
        return shows

    def _end_reasoning(self, before: int) -> None:
        """End the answer's reasoning, whose last token ids may be white space that was not shown.

        `before`: the number of ids before the chunk with the text that follows.
        """
        self._reasoning_ids = self._index_of_end_marker(
            self._reasoning_ids_before_chunk, max(self._reasoning_ids, before - 1)
        )

    def _index_of_end_marker(self, start: int, otherwise: int) -> int:
        """Return the index of the marker that ends reasoning, searched from `start`; `otherwise` if there is none."""
        later = self._ids[start:].tolist()
        ends = [later.index(marker) for marker in self.grammar.reasoning_end_ids if marker in later]
        return start + min(ends) if ends else otherwise
