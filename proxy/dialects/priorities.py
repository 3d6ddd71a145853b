"""The priority that a request asks for, bounded by its client key before it reaches the queue and the engines."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from proxy.call import PRIORITY_HEADER
from proxy.wire.lax import whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.call import Call

MEMBER: Final = "priority"


def bounded(call: Call, least: int, *, lower_first: bool) -> Call:
    """The call with a priority, in its body and headers, that does not go before `least`.

    A request that asks for none reaches engines without one, since vLLM refuses any number but 0 unless its scheduling
    policy is `priority`.

    Args:
        call: What the client asks for.
        least: The client key's priority, of which lower goes first.
        lower_first: Whether engines serve a lower member `priority` first.
    """
    asked_in_header = call.headers.get(PRIORITY_HEADER)
    if asked_in_header is None and (call.is_ordinary or MEMBER not in call.values):
        return call
    changes = change(call.values.get(MEMBER), least, lower_first=lower_first)
    headers = call.headers
    if asked_in_header is not None:
        headers = {name: value for name, value in headers.items() if name != PRIORITY_HEADER}
        with suppress(ValueError):  # then it is dropped: an engine might read a number where this gateway reads none
            headers[PRIORITY_HEADER] = str(max(least, int(asked_in_header)))
    if not changes:
        return replace(call, headers=headers)
    call.document.values.update(changes)
    return replace(call, headers=headers, changes={**call.changes, **changes})


def change(asked: object, least: int, *, lower_first: bool) -> Mapping[str, Any]:
    """The change of the member `priority` of a body, `asked`; empty if it may stay as it is."""
    try:
        number: Any = whole_number(asked)
    except ValueError:
        return {}  # neither is it a number for engines
    allowed = max(least, number) if lower_first else min(-least, number)
    return {} if allowed is asked else {MEMBER: allowed}
