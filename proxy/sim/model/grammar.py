"""Structured output: answers that are bound to a grammar, of which engines know JSON schemas and lists of choices.

As in vLLM (`v1/structured_output/`) the grammar begins behind the reasoning, and anew in every request: an engine that
is given a part of a document as its prompt writes another document behind it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import orjson

from proxy.sim.model.schema import Unsupported, instance
from proxy.sim.model.tokenizer import END, SPACE, THINK_END, encode
from proxy.sim.model.writer import Writer, digest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Grammar = Any
"""A JSON schema whose values are written as JSON or, in a tuple, texts of which one is written."""

_OBJECT: Grammar = {"type": "object"}


def read_grammar(body: Mapping[str, Any]) -> Grammar | None:
    """What the answer is bound to; None: nothing, or what is not simulated, such as regular expressions.

    Raises Unsupported for a grammar that cannot be kept to.
    """
    try:
        return _read(body)
    except (AttributeError, KeyError, TypeError, ValueError) as problem:  # a schema may have any shape
        raise Unsupported(str(problem)) from None


def _read(body: Mapping[str, Any]) -> Grammar | None:
    form = body.get("response_format") or {}
    outputs = body.get("structured_outputs") or {}
    grammar: Grammar | None = None
    if choices := body.get("guided_choice") or outputs.get("choice"):
        grammar = tuple(map(str, choices))
    elif (given := body.get("guided_json") or outputs.get("json")) is not None:
        grammar = orjson.loads(given) if isinstance(given, str) else given
    elif form.get("type") == "json_schema":
        named = form.get("json_schema") or {}
        grammar = named.get("schema", named.get("json_schema", _OBJECT))
    elif form.get("type") == "json_object" or outputs.get("json_object"):
        grammar = _OBJECT
    if grammar is not None and not isinstance(grammar, tuple):
        instance(grammar, 0)
    return grammar


class GrammarWriter:
    """Writes the continuation of a token sequence: its reasoning to the end, and then what the grammar allows."""

    def __init__(self, ids: Sequence[int], grammar: Grammar, *, reasons: bool) -> None:
        """`reasons`: the ids end within reasoning."""
        self._grammar = grammar
        self._reasoning = Writer(ids) if reasons else None
        self._ids = list(ids)
        self._queue: deque[int] = deque()
        if not reasons:
            self._begin()

    def next(self, *, may_end: bool = True) -> int:
        """The next token. What may not end yet goes on with blanks, which JSON allows."""
        if self._reasoning is not None:
            token = self._reasoning.next(may_end=False)
            self._ids.append(token)
            if token == THINK_END:
                self._reasoning = None
                self._begin()
            return token
        if self._queue:
            return self._queue.popleft()
        return END if may_end else SPACE

    def _begin(self) -> None:
        seed = digest(self._ids)
        if isinstance(self._grammar, tuple):
            text = self._grammar[seed % len(self._grammar)]
        else:
            text = orjson.dumps(_instance(self._grammar, seed)).decode()
        self._queue.extend(encode(text))


def _instance(grammar: Grammar, seed: int) -> Any:
    """One of the values; the one that was tried before, where this one turns out to be none."""
    try:
        return instance(grammar, seed)
    except Unsupported:
        return instance(grammar, 0)
