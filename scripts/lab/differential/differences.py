"""Where two records of the same request differ, member by member and header by header.

What is another one each time, and has to be, is replaced by a word: rooms, ids, the address of the program itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from lab.differential.pairs import Pair
from lab.differential.protocols import Heard, is_several, units
from lab.differential.requests import Request

CLIENT, PREFILL, DECODE = "client", "prefill", "decode"
STATUS, LEGS, RULES = "(status)", "(requests)", "(rules)"

# What belongs to a connection and not to a request.
_OF_THE_CONNECTION = frozenset(
    {"accept", "accept-encoding", "connection", "content-length", "host", "transfer-encoding", "user-agent"}
)
_IDS = frozenset(
    {
        *("rid", "header x-request-id"),
        *(f"kv_transfer_params.{name}" for name in ("remote_request_id", "request_id", "transfer_id")),
    }
)


@dataclass(frozen=True, slots=True)
class Difference:
    """One header, or one member of a body by its path: the values as JSON; None where it is not there."""

    pair: Pair
    request: str
    leg: str
    member: str
    peers: str | None
    ours: str | None
    sent: str | None = None
    """What the client sent."""


@dataclass(frozen=True, slots=True)
class Record:
    """What became of one request: the client's status, what engines heard, and what they could not work with."""

    status: int
    heard: Sequence[Heard]
    problems: Sequence[str]


def compare(pair: Pair, request: Request, peers: Record, ours: Record) -> Iterator[Difference]:
    """Where they differ. There is nothing to compare where the other program refused the request."""
    for problem in ours.problems:
        yield Difference(pair, request.name, CLIENT, RULES, None, problem)
    if not 200 <= peers.status < 300:
        return
    if peers.status != ours.status:
        yield Difference(pair, request.name, CLIENT, STATUS, str(peers.status), str(ours.status))
        return
    sent = _Leg(request.path, request.headers, json.loads(request.body)).members
    for leg in (PREFILL, DECODE):
        theirs, own = (_legs(record, leg) for record in (peers, ours))
        if any(is_several(each.asked) for each in theirs) and not any(is_several(each.asked) for each in own):
            yield Difference(pair, request.name, leg, LEGS, str(len(theirs)), str(len(own)))
            theirs = [replace(each, asked=unit) for each in theirs for unit in units(each.asked)]
        if len(theirs) != len(own):
            yield Difference(pair, request.name, leg, LEGS, f"{len(theirs)} as split", str(len(own)))
            continue
        # Units run side by side: their order means nothing.
        for one, other in zip(sorted(theirs, key=_Leg.order), sorted(own, key=_Leg.order), strict=True):
            theirs_by_name, own_by_name = one.members, other.members
            for name in sorted({*theirs_by_name, *own_by_name}):
                values = theirs_by_name.get(name), own_by_name.get(name)
                if values[0] != values[1]:
                    yield Difference(pair, request.name, leg, name, *values, sent.get(name))


@dataclass(frozen=True, slots=True)
class _Leg:
    """A request to an engine, or that of the client, in parts."""

    path: str
    headers: Mapping[str, str]
    asked: Mapping[str, Any]

    @property
    def members(self) -> dict[str, str]:
        """All that is compared, as JSON, by name."""
        headers = {f"header {name.lower()}": value for name, value in self.headers.items()}
        parts = {"(path)": self.path, **headers, **dict(_leaves("", self.asked))}
        of_the_connection = {f"header {name}" for name in _OF_THE_CONNECTION}
        return {name: _as_json(name, value) for name, value in parts.items() if name not in of_the_connection}

    def order(self) -> str:
        """Something to sort by that is the same for the same unit."""
        return json.dumps([self.asked.get(name) for name in ("prompt", "seed", "text", "input_ids")])


def _legs(record: Record, leg: str) -> list[_Leg]:
    heard = [heard for heard in record.heard if heard.role == leg]
    return [_Leg(each.path, each.headers, json.loads(each.body)) for each in heard]


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What stands in members of members, by its path; objects and arrays that are empty, too."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else key, inner)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves(f"{name}[{index}]", inner)
    else:
        yield name, value


def _as_json(name: str, value: Any) -> str:
    """In which 1, 1.0 and true are three values."""
    if name in _IDS:
        value = "an id"
    elif name.partition("[")[0] == "bootstrap_room":
        value = "a room"
    elif name == "kv_transfer_params.metaserver":
        value = urlsplit(value).path
    return json.dumps(value, ensure_ascii=False)
