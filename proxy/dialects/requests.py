"""Functions with which all dialects read requests.

The gateway reads and checks only the members on which its decisions depend. Engines get all others in the client's
bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from proxy.common.errors import BadRequest
from proxy.wire.document import REMOVED, Document, InvalidDocument
from proxy.wire.python_json import read_flag, read_whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Set

    Reading = tuple[Callable[[object], object], str, type]

WHOLE_NUMBER: Final = (read_whole_number, "a whole number", int)
FLAG: Final = (read_flag, "true or false", bool)
"""How to read a flag as engines do: the function that reads it, the expected value for error messages, and the type
that needs no conversion.
"""

_OBJECT_TYPES: Final = frozenset({dict})
"""Types of JSON objects as parsed here."""


def parse_body(raw: bytes) -> Document:
    """Parse the JSON of a request body. Raises BadRequest."""
    try:
        return Document(raw)
    except InvalidDocument as error:
        raise BadRequest(str(error), code="invalid_json") from None


def coerced_members(values: Mapping[str, Any], readings: Mapping[str, Reading]) -> dict[str, object]:
    """Return the members whose values engines convert to another type (`"5"` to 5), with the converted values.

    Raises BadRequest for a value that engines cannot convert.
    """
    changes: dict[str, object] = {}
    for name, (read, what, plain) in readings.items():
        value = values.get(name)
        if value is None or type(value) is plain:
            continue
        try:
            coerced = read(value)
        except ValueError:
            raise BadRequest(f"{name} must be {what}", param=name) from None
        if coerced is not value:
            changes[name] = coerced
    return changes


def remove_reserved_members(values: Mapping[str, Any], reserved: Set[str]) -> dict[str, object]:
    """Return the changes that remove reserved members from all places where engines read them.

    vLLM merges the members of `vllm_xargs` with `kv_transfer_params` (`to_sampling_params`).
    """
    changes: dict[str, object] = {}
    if not reserved.isdisjoint(values):
        changes.update((name, REMOVED) for name in reserved if name in values)
    extra = values.get("vllm_xargs")
    if isinstance(extra, dict) and not reserved.isdisjoint(extra):
        changes["vllm_xargs"] = {name: value for name, value in extra.items() if name not in reserved}
    return changes


def read_boolean(values: Mapping[str, Any], name: str) -> bool:
    """Return the value of a flag.

    Raises BadRequest for values such as `"yes"`, because engines differ in how they read them.
    """
    value = values.get(name)
    if value not in (None, 0, 1):  # True is 1, and engines take 1 for true
        raise BadRequest(f"{name} must be true or false", param=name)
    return bool(value)


def read_positive_number(values: Mapping[str, Any], name: str) -> object:
    """Return the value of a limit, which may be a number in a string. Raises BadRequest for values below 1."""
    value = values.get(name)
    try:
        number: Any = read_whole_number(value)
        if number >= 1:
            return number
    except ValueError:
        pass
    raise BadRequest(f"{name} must be a positive whole number", param=name)


def check_object_member(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the object in a member; an empty object if the member is missing. Raises BadRequest."""
    value = values.get(name)
    if value is not None and not isinstance(value, dict):
        raise BadRequest(f"{name} must be an object", param=name)
    return value or {}


def check_objects(values: object, param: str) -> list[dict[str, Any]]:
    """Return the values if they are a list of objects. `param`: the name of the member. Raises BadRequest."""
    if not isinstance(values, list) or not _OBJECT_TYPES.issuperset(map(type, values)):
        raise BadRequest(f"{param} must be a list of objects", param=param)
    return values
