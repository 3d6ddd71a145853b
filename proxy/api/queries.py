"""What queries say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from proxy.common.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

_TRUTHS: Final[Mapping[str, bool]] = {"": True, "1": True, "true": True, "0": False, "false": False}


def truth(name: str, value: str) -> bool:
    """Whether a parameter says yes, which its name alone does, too. Raises BadRequest for anything that is neither yes
    nor no.
    """
    if value not in _TRUTHS:
        raise BadRequest(f"{name} must be true or false", param=name)
    return _TRUTHS[value]
