"""Generates structured output: answers that follow a JSON schema, or are one of several choices.

As in vLLM (`v1/structured_output/`), the grammar starts after the reasoning, and it starts again in every request: if
the prompt contains part of a document, the engine writes a whole document after it.

Supported are types, objects with required and other properties, arrays and tuples, enums and constants, bounds, the
formats of pydantic's types, references, and combinations. Any other schema is rejected.
"""

from __future__ import annotations

from collections import deque
from math import ceil, floor
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import orjson

from proxy.sim.model.tokenizer import END, SPACE, THINK_END, encode_text
from proxy.sim.model.writer import DeterministicWriter, digest_token_ids

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


Schema = Any
"""A JSON schema. The values true and false are schemas, too."""

# Below this depth, and beyond this number of values, only required members are generated.
_SHALLOW_DEPTH: Final = 5
_MANY_ITEMS: Final = 500
# A schema that goes deeper all the same has no end.
_MAX_DEPTH: Final = 40
_VOCABULARY: Final = (
    "amber",
    "birch",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "heron",
    "ivory",
    "jade",
    "krill",
    "lotus",
)
_FORMAT_EXAMPLES: Final = {
    "date": "2026-01-{:02}",
    "time": "10:00:{:02}Z",
    "date-time": "2026-01-01T10:00:{:02}Z",
    "duration": "P{}D",
    "email": "user{}@example.com",
    "hostname": "host{}.example.com",
    "ipv4": "192.0.2.{}",
    "ipv6": "2001:db8::{}",
    "uri": "https://example.com/{}",
    "uuid": "00000000-0000-4000-8000-0000000000{:02}",
}
_UNSUPPORTED_KEYWORDS: Final = frozenset(
    {"pattern", "not", "if", "patternProperties", "propertyNames", "contains", "$dynamicRef"}
)
_COUNT_KEYWORDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class UnsupportedSchema(ValueError):
    """The program knows no value that the schema allows."""


def make_instance(schema: Schema, seed: int) -> Any:
    """Return a value that `schema` allows. Raises UnsupportedSchema."""
    return _InstanceMaker(schema).make_value(schema, seed, 0)


class _InstanceMaker:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._made = 0

    def make_value(self, schema: Schema, seed: int, depth: int) -> Any:
        self._made += 1
        if self._made > _MANY_ITEMS:
            depth = max(depth, _SHALLOW_DEPTH + 1)
        if schema is True or schema == {}:
            return _pick_word(seed)
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            raise UnsupportedSchema("no value fits, or it would have no end")
        if unknown := _UNSUPPORTED_KEYWORDS & schema.keys():
            raise UnsupportedSchema(f"{min(unknown)} is not understood")
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return _pick_option(schema["enum"], seed)
        if "$ref" in schema:
            rest = {name: value for name, value in schema.items() if name != "$ref"}
            return self.make_value(
                self._merge_schemas([self._resolve_reference(schema["$ref"]), rest]), seed, depth + 1
            )
        if "allOf" in schema:
            rest = {name: value for name, value in schema.items() if name != "allOf"}
            return self.make_value(self._merge_schemas([*schema["allOf"], rest]), seed, depth + 1)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                rest = {other: value for other, value in schema.items() if other != name}
                return self.make_value(
                    self._merge_schemas([self._choose_option(schema[name], seed, depth), rest]), seed, depth + 1
                )
        return self._make_typed_value(schema, seed, depth)

    def _make_typed_value(self, schema: dict[str, Any], seed: int, depth: int) -> Any:
        kind = schema.get("type") or _implied_type(schema)
        if isinstance(kind, list):
            kind = "null" if depth > _SHALLOW_DEPTH and "null" in kind else _pick_option(kind, seed)
        match kind:
            case "object":
                return self._make_object(schema, seed, depth)
            case "array":
                return self._make_array(schema, seed, depth)
            case "string":
                return _make_string(schema, seed)
            case "integer" | "number":
                return _make_number(schema, seed, is_whole=kind == "integer")
            case "boolean":
                return bool(seed & 1)
            case "null":
                return None
        raise UnsupportedSchema(f"{kind} is no type")

    def _make_object(self, schema: dict[str, Any], seed: int, depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        names = [name for name in properties if name in required or depth <= _SHALLOW_DEPTH]
        names += [name for name in required if name not in properties]
        others = schema.get("additionalProperties", True)
        missing = range(max(0, (schema.get("minProperties") or 0) - len(names)))
        if missing and others is False:
            raise UnsupportedSchema("there are too few properties")
        if not properties and depth <= _SHALLOW_DEPTH and others is not False:  # a mapping shows what it is of
            missing = range(max(1, len(missing)))
        names += [f"{_pick_word(seed + number)}_{number}" for number in missing]
        return {
            name: self.make_value(properties.get(name, others), crc32(name.encode(), seed), depth + 1) for name in names
        }

    def _make_array(self, schema: dict[str, Any], seed: int, depth: int) -> list[Any]:
        first = schema.get("prefixItems") or []
        items = schema.get("items", True)
        least = max(schema.get("minItems") or 0, len(first))
        most = schema.get("maxItems", max(least, 2))
        count = least if depth > _SHALLOW_DEPTH or items is False else min(most, max(least, 1 + seed % 2))
        values: list[Any] = []
        for index in range(count):
            each = first[index] if index < len(first) else items
            for attempt in range(64):
                value = self.make_value(each, crc32(b"%d %d" % (index, attempt), seed), depth + 1)
                if not schema.get("uniqueItems") or value not in values:
                    break
            else:
                raise UnsupportedSchema("there are too few different items")
            values.append(value)
        return values

    def _choose_option(self, options: list[Schema], seed: int, depth: int) -> Schema:
        """Return one of several schemas; at a great depth, one that does not nest further."""
        flat = [option for option in options if isinstance(option, dict) and not {"$ref", "items"} & option.keys()]
        return _pick_option(flat if flat and depth > _SHALLOW_DEPTH else options, seed)

    def _resolve_reference(self, reference: Any) -> Schema:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise UnsupportedSchema("a reference leads out of the schema")
        found = self._root
        for part in reference[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                raise UnsupportedSchema("a reference leads nowhere")
            found = found[name]
        return found

    def _merge_schemas(self, schemas: list[Schema]) -> Schema:
        """Return a schema with the requirements of all schemas. Of conflicting requirements, only one is kept."""
        merged: dict[str, Any] = {}
        for schema in schemas:
            if schema is False:
                return False
            for name, value in ({} if schema is True else self._resolve_schema(schema)).items():
                if name == "properties":
                    value = {**merged.get(name, {}), **value}
                elif name == "required":
                    value = list(dict.fromkeys([*merged.get(name, []), *value]))
                merged[name] = value
        return merged

    def _resolve_schema(self, schema: Any) -> dict[str, Any]:
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict):
                break
            if "$ref" not in schema:
                return schema
            rest = {name: value for name, value in schema.items() if name != "$ref"}
            target = self._resolve_reference(schema["$ref"])
            schema = {**target, **rest} if isinstance(target, dict) else target
        raise UnsupportedSchema("a part of the schema is no schema")


def _implied_type(schema: dict[str, Any]) -> str:
    """Return the type that a schema without `type` implies."""
    if {"properties", "required", "additionalProperties"} & schema.keys():
        return "object"
    if {"items", "prefixItems", "minItems"} & schema.keys():
        return "array"
    return "number" if schema.keys() & set(_COUNT_KEYWORDS) else "string"


def _make_string(schema: dict[str, Any], seed: int) -> str:
    form = schema.get("format")
    if form in _FORMAT_EXAMPLES:
        return _FORMAT_EXAMPLES[form].format(10 + seed % 18)
    least, most = schema.get("minLength") or 0, schema.get("maxLength")
    text = _pick_word(seed)
    while len(text) < least:
        text += " " + _pick_word(crc32(text.encode(), seed))
    return text if most is None else text[:most]


def _make_number(schema: dict[str, Any], seed: int, *, is_whole: bool) -> float:
    """Return a number within bounds, which may be open, and may be booleans as in older drafts."""
    low, high = schema.get("minimum"), schema.get("maximum")
    step = schema.get("multipleOf") or (1 if is_whole else 0.5)
    for name, sign in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
        bound = schema.get(name)
        if bound is True:
            bound = low if sign > 0 else high
        if isinstance(bound, int | float) and not isinstance(bound, bool):
            nearest = bound + sign * min(step, 1e-3 if not is_whole and "multipleOf" not in schema else step)
            if sign > 0:
                low = nearest if low is None else max(low, nearest)
            else:
                high = nearest if high is None else min(high, nearest)
    if low is None:
        low = 0 if high is None or high >= 0 else high - 100 * step
    least, most = ceil(low / step), floor((low + 100 * step if high is None else high) / step)
    if least > most:
        if is_whole or "multipleOf" in schema:
            raise UnsupportedSchema("no number is within the bounds of the schema")
        return float(low)
    value = (least + seed % (most - least + 1)) * step
    return int(value) if is_whole else value


def _pick_option(options: Any, seed: int) -> Any:
    if not isinstance(options, list) or not options:
        raise UnsupportedSchema("there is nothing to choose from")
    return options[seed % len(options)]


def _pick_word(seed: int) -> str:
    return _VOCABULARY[seed * 2654435761 % 2**32 % len(_VOCABULARY)]


Grammar = Any
"""A JSON schema, whose values are written as JSON; or a tuple of texts, one of which is written."""

_OBJECT_GRAMMAR: Grammar = {"type": "object"}


def read_grammar(body: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar of an answer; None if there is none, or if it is not simulated, such as a regular expression.

    Raises UnsupportedSchema for a grammar that the writer cannot follow.
    """
    try:
        return _find_grammar(body)
    except (AttributeError, KeyError, TypeError, ValueError) as problem:  # a schema may have any shape
        raise UnsupportedSchema(str(problem)) from None


def _find_grammar(body: Mapping[str, Any]) -> Grammar | None:
    form = body.get("response_format") or {}
    outputs = body.get("structured_outputs") or {}
    grammar: Grammar | None = None
    if choices := body.get("guided_choice") or outputs.get("choice"):
        grammar = tuple(map(str, choices))
    elif (given := body.get("guided_json") or outputs.get("json")) is not None:
        grammar = orjson.loads(given) if isinstance(given, str) else given
    elif form.get("type") == "json_schema":
        named = form.get("json_schema") or {}
        grammar = named.get("schema", named.get("json_schema", _OBJECT_GRAMMAR))
    elif form.get("type") == "json_object" or outputs.get("json_object"):
        grammar = _OBJECT_GRAMMAR
    if grammar is not None and not isinstance(grammar, tuple):
        make_instance(grammar, 0)
    return grammar


class GrammarWriter:
    """Writes the continuation of a token sequence: the rest of its reasoning, then a value that the grammar allows."""

    def __init__(self, ids: Sequence[int], grammar: Grammar, *, reasons: bool) -> None:
        """Create a writer. `reasons`: whether `ids` end within reasoning."""
        self._grammar = grammar
        self._reasoning = DeterministicWriter(ids) if reasons else None
        self._ids = list(ids)
        self._queue: deque[int] = deque()
        if not reasons:
            self._begin()

    def next(self, *, may_end: bool = True) -> int:
        """Return the next token. A text that may not end yet continues with blanks, which JSON allows."""
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
        seed = digest_token_ids(self._ids)
        if isinstance(self._grammar, tuple):
            text = self._grammar[seed % len(self._grammar)]
        else:
            text = orjson.dumps(_make_grammar_instance(self._grammar, seed)).decode()
        self._queue.extend(encode_text(text))


def _make_grammar_instance(grammar: Grammar, seed: int) -> Any:
    """Return the value for a seed; the value for seed 0 if no value is found for this seed."""
    try:
        return make_instance(grammar, seed)
    except UnsupportedSchema:
        return make_instance(grammar, 0)
