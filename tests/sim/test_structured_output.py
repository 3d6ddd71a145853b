"""Answers that are bound to a grammar: documents that a schema allows, and one of several choices."""

from __future__ import annotations

from datetime import date, datetime
from enum import StrEnum
from typing import Any, Literal
from uuid import UUID

import orjson
import pytest
from pydantic import BaseModel, ConfigDict, Field

from proxy.sim.engine import SimulatedEngine
from proxy.sim.model.grammar import UnsupportedSchema, make_instance
from tests.sim.conftest import Client

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    weight: float = Field(gt=0.5, lt=0.6)


class Node(BaseModel):
    name: str = Field(min_length=3, max_length=12)
    children: list[Node] = []
    parent: Node | None = None


class Everything(BaseModel):
    """A schema with the keywords that clients use."""

    model_config = ConfigDict(extra="forbid")
    number: int = Field(multiple_of=7, gt=3)
    colors: list[Color] = Field(min_length=2, max_length=3)
    counts: dict[str, int]
    maybe: str | None
    flag: bool
    pair: tuple[int, str]
    pet: Cat | Dog = Field(discriminator="kind")
    tree: Node
    at: datetime
    day: date
    id: UUID
    different: set[int] = Field(min_length=2)
    negative: int = Field(le=-5)
    share: float = Field(ge=0, le=1)
    constant: Literal[3, "x", None]
    anything: Any


SCHEMA = Everything.model_json_schema()


def test_every_value_is_one_that_the_schema_allows() -> None:
    values = [orjson.dumps(make_instance(SCHEMA, seed * 7919)) for seed in range(300)]
    for value in values:
        Everything.model_validate_json(value)
        assert len(value) < 5000
    assert len(set(values)) > 100


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (True, str),
        ({}, str),
        ({"type": "object"}, dict),
        ({"type": ["null"]}, type(None)),
        ({"properties": {"a": {"const": 1}}, "required": ["a"]}, dict),
        ({"items": {"type": "boolean"}}, list),
        ({"minimum": 3}, int | float),
        ({"allOf": [{"$ref": "#/$defs/a"}, {"required": ["b"]}], "$defs": {"a": {"type": "object"}}}, dict),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "number"}}}, int | float),
        ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5}, int),
        ({"type": "object", "required": ["a"], "additionalProperties": {"type": "integer"}}, dict),
    ],
    ids=str,
)
def test_schemas_may_be_short(schema: Any, value: Any) -> None:
    assert isinstance(make_instance(schema, 12345), value)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "string", "pattern": "a+"},
        {"$ref": "#/$defs/none"},
        {"$ref": "https://example.com"},
        {"$ref": "#"},
        {"enum": []},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "array", "items": {"const": 1}, "uniqueItems": True, "minItems": 2},
        {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "object", "additionalProperties": False, "minProperties": 1},
    ],
    ids=str,
)
def test_unsupported_schemas_produce_no_output(schema: Any) -> None:
    with pytest.raises(UnsupportedSchema):
        make_instance(schema, 1)


ASKED = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
    {"guided_json": SCHEMA},
    {"guided_json": orjson.dumps(SCHEMA).decode()},
    {"structured_outputs": {"json": SCHEMA}},
]


@pytest.mark.parametrize("asked", ASKED, ids=["response_format", "guided_json", "text", "structured_outputs"])
@pytest.mark.parametrize("profile_name", ["v0.18", "v0.33", "sglang"])
async def test_answer_is_a_document_that_the_schema_allows(
    client: Client, profile_name: str, asked: dict[str, Any]
) -> None:
    async with SimulatedEngine(profile_name=profile_name) as engine:
        chat = {"messages": [{"role": "user", "content": "Go"}], "max_tokens": 9000} | asked
        _, answer = await client.post(engine, CHAT, chat)
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop"
        Everything.model_validate_json(choice["message"]["content"])
        _, answer = await client.post(engine, TEXT, {"prompt": "Go", "max_tokens": 9000} | asked)
        Everything.model_validate_json(answer["choices"][0]["text"])


async def test_grammar_begins_behind_the_reasoning(client: Client, engine: SimulatedEngine) -> None:
    body = {"messages": [{"role": "user", "content": "Go"}], "max_tokens": 500}
    thinks = body | {"chat_template_kwargs": {"thinking": True}}
    _, free = await client.post(engine, CHAT, thinks)
    _, bound = await client.post(engine, CHAT, thinks | {"response_format": {"type": "json_object"}})
    message = bound["choices"][0]["message"]
    assert message["reasoning"] == free["choices"][0]["message"]["reasoning"]
    assert isinstance(orjson.loads(message["content"]), dict)


async def test_document_that_is_too_long_is_cut_off(client: Client, engine: SimulatedEngine) -> None:
    body = {"prompt": "Go", "max_tokens": 5, "guided_json": SCHEMA}
    _, answer = await client.post(engine, TEXT, body)
    assert (answer["choices"][0]["finish_reason"], len(answer["choices"][0]["text"])) == ("length", 5)


async def test_one_of_several_choices(client: Client, engine: SimulatedEngine) -> None:
    choices = ["yes", "no", "perhaps"]
    for asked in ({"guided_choice": choices}, {"structured_outputs": {"choice": choices}}):
        _, answer = await client.post(engine, TEXT, {"prompt": "Go"} | asked)
        assert answer["choices"][0]["text"] in choices


async def test_grammar_that_cannot_be_kept_to_is_refused(client: Client, engine: SimulatedEngine) -> None:
    for schema in ({"type": "string", "pattern": "a"}, {"properties": 3}, "{"):
        status, answer = await client.post(engine, TEXT, {"prompt": "Go", "guided_json": schema})
        assert (status, answer["error"]["param"]) == (400, "structured_outputs")
