"""One engine endpoint, its role, and what a request costs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from proxy.common.endpoints import canonical_host, engine_url


class Role(StrEnum):
    """What an engine does in a disaggregated deployment."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"


class Load(NamedTuple):
    """What requests cost a backend, in whole tokens: integers, because float costs leave a residue when given back.

    `compute` is being worked on now, `kv` is cache that is held.
    """

    compute: int = 0
    kv: int = 0


@dataclass(frozen=True, slots=True)
class Backend:
    """One engine endpoint, equal to another with the same role and address, however that is spelled.

    `slot` is its column in the scoreboard. `trusted`: it may be sent the gateway's engine key. `bootstrap_port`: where
    decoders meet a prefiller of SGLang, or of the upstream MooncakeConnector; None: they know. `models`: what it
    serves, as whoever named it says; empty: the engine is asked.
    """

    role: Role
    host: str = field(compare=False)
    port: int = field(compare=False)
    slot: int = field(default=0, compare=False)
    trusted: bool = field(default=False, compare=False)
    bootstrap_port: int | None = field(default=None, compare=False)
    models: tuple[str, ...] = field(default=(), compare=False)
    place: tuple[str, int] = field(init=False, repr=False)
    """The same for all spellings of one address."""
    name: str = field(init=False, compare=False, repr=False)
    """`host:port`, an IPv6 host in brackets: the metric label, the log word and the Host header."""
    key: str = field(init=False, compare=False, repr=False)
    """The same for equal backends only. To look a string up costs less: a backend's hash is a call of Python code."""
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Once: a request asks for both many times.
        name = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        object.__setattr__(self, "name", name)
        place = (canonical_host(self.host), self.port)
        object.__setattr__(self, "place", place)
        object.__setattr__(self, "key", f"{self.role} {place[0]} {place[1]}")
        object.__setattr__(self, "_hash", hash((self.role, place)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def url(self) -> str:
        """Base URL without a path, for example `http://10.0.0.1:7100`."""
        return engine_url(self.host, self.port)
