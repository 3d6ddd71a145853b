"""Numbers and flags that are spelled in another way: `10.0`, `"10"`, `"true"`.

Engines take them, since their request models are pydantic's, in its lax mode; so the same library reads them here, and
only what is no number already. What it refuses, engines refuse.
"""

from __future__ import annotations

import math
from typing import Final, TypeVar

from pydantic import TypeAdapter, ValidationError

_Kind = TypeVar("_Kind", int, bool)

_WHOLE_NUMBER: Final = TypeAdapter(int)
_FLAG: Final = TypeAdapter(bool)

# orjson reads whole numbers of more than 64 bits as fractions, so they are not known exactly. Infinity is one that has
# more than 308 digits, which Python's parser, and so an engine, refuses if it has more than 4,300.
_INEXACT: Final = float(2**63)


def whole_number(value: object) -> object:
    """The number that a value is; left as it is when that has more than 64 bits. Raises ValueError for what is none."""
    if type(value) is int or (isinstance(value, float) and _INEXACT <= abs(value) < math.inf):
        return value
    number = _validated(_WHOLE_NUMBER, value)
    return number if -(2**63) <= number < 2**64 else value


def flag(value: object) -> object:
    """The boolean that a value is. Raises ValueError for what is none."""
    return value if isinstance(value, bool) else _validated(_FLAG, value)


def _validated(adapter: TypeAdapter[_Kind], value: object) -> _Kind:
    try:
        return adapter.validate_python(value)
    except ValidationError:
        raise ValueError("neither that nor spelled like it") from None  # pydantic's text quotes the value
