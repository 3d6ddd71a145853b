"""Functions with which all dialects read a request.

The gateway reads and checks only the members that it decides by. Engines get all others in the client's bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from proxy.common.errors import BadRequest
from proxy.wire.document import REMOVED, Document, InvalidDocument
from proxy.wire.python_json import flag, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Set

    Reading = tuple[Callable[[object], object], str, type]

WHOLE_NUMBER: Final = (whole_number, "a whole number", int)
FLAG: Final = (flag, "true or false", bool)
"""How to read a member as engines do: a function, the expected value for error messages, and the type that needs no
conversion."""


def read(raw: bytes) -> Document:
    """Return the JSON of a request body, for `Dialect.parse`. Raises BadRequest."""
    try:
        return Document(raw)
    except InvalidDocument as error:
        raise BadRequest(str(error), code="invalid_json") from None


def coerced_members(values: Mapping[str, Any], readings: Mapping[str, Reading]) -> dict[str, object]:
    """Return the members whose JSON type engines coerce (`"5"` for 5), with the coerced value.

    Raises BadRequest for a value that engines cannot read.
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


def without_reserved(values: Mapping[str, Any], reserved: Set[str]) -> dict[str, object]:
    """Return the changes that remove the reserved members wherever engines read them.

    vLLM merges the members of `vllm_xargs` with `kv_transfer_params` (`to_sampling_params`).
    """
    changes: dict[str, object] = {}
    if not reserved.isdisjoint(values):
        changes.update((name, REMOVED) for name in reserved if name in values)
    extra = values.get("vllm_xargs")
    if isinstance(extra, dict) and not reserved.isdisjoint(extra):
        changes["vllm_xargs"] = {name: value for name, value in extra.items() if name not in reserved}
    return changes


def boolean(values: Mapping[str, Any], name: str) -> bool:
    """Return a flag that the gateway uses. Raises BadRequest for `"yes"`, which engines read in different ways."""
    value = values.get(name)
    if value not in (None, 0, 1):  # True is 1, and engines take 1 for true
        raise BadRequest(f"{name} must be true or false", param=name)
    return bool(value)


def at_least_one(values: Mapping[str, Any], name: str) -> object:
    """Return a limit, also if it is spelled as text. Raises BadRequest unless it is a whole number of at least 1."""
    value = values.get(name)
    try:
        number: Any = whole_number(value)
        if number >= 1:
            return number
    except ValueError:
        pass
    raise BadRequest(f"{name} must be a positive whole number", param=name)


def object_in(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a member that is an object; an empty object if it is missing. Raises BadRequest."""
    value = values.get(name)
    if value is not None and not isinstance(value, dict):
        raise BadRequest(f"{name} must be an object", param=name)
    return value or {}


def objects(values: object, param: str) -> list[dict[str, Any]]:
    """Return the list of objects of the member `param`. Raises BadRequest."""
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise BadRequest(f"{param} must be a list of objects", param=param)
    return values
