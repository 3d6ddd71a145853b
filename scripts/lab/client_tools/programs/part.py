"""Inputs of all programs: a script in three turns, two with a tool (`proxy/sim/model/writer.py`)."""

from __future__ import annotations

import json
import sys
from typing import Any, Final

MODEL: Final = "served"
ALIAS: Final = "claude-sonnet-5"
PICTURE: Final = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "size": {"type": "integer"}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
CITY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TURNS: Final = [
    {"say": "I look it up.", "calls": [{"name": "find", "arguments": {"city": "Zürich"}}]},
    {"say": "One more.", "calls": [{"name": "find", "arguments": {"city": "Bern"}}]},
    {"say": "Both are there."},
]
PART: Final = f"play: {json.dumps(TURNS, ensure_ascii=False)}"
END: Final = "Both are there."


def port() -> int:
    """Return the port of the gateway."""
    return int(sys.argv[1])


def found(city: object) -> str:
    """Return the tool's result."""
    assert city in ("Zürich", "Bern"), city
    return f"{city} is there."
