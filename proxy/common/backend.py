"""An engine endpoint, its role, and its load."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from proxy.common.endpoints import canonical_host, engine_url


class Role(StrEnum):
    """Role of an engine in a disaggregated deployment."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"

    @property
    def counterpart(self) -> Role:
        """The role at the other end of a handoff. Encoders have none, and get the prefillers' role."""
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL


class Load(NamedTuple):
    """Load of a backend in tokens. Integers return to zero exactly; floats would leave a residue."""

    compute_tokens: int = 0
    """Tokens that the backend is computing."""
    kv_tokens: int = 0
    """Tokens whose KV cache the backend holds."""


@dataclass(frozen=True, slots=True)
class Backend:
    """An engine endpoint. Two are equal if role and address are the same, in any spelling of the address."""

    role: Role
    host: str = field(compare=False)
    port: int = field(compare=False)
    slot: int = field(default=0, compare=False)
    """Column of the backend in the scoreboard."""
    is_trusted: bool = field(default=False, compare=False)
    """Whether the gateway may send its engine key to the backend."""
    bootstrap_port: int | None = field(default=None, compare=False)
    """Port where decoders find a prefiller of SGLang or of the upstream MooncakeConnector; None: the default port."""
    models: tuple[str, ...] = field(default=(), compare=False)
    """Configured names of the models that it serves; empty: the engine reports them."""
    tls: bool = field(default=False, compare=False)
    """Whether the engine is reached by TLS."""
    is_elastic: bool = field(default=False, compare=False)
    """Whether the instance may exchange its role with the other one of prefill and decode while the gateway runs."""
    place: tuple[str, int] = field(init=False, repr=False)
    """Host and port, the same for all spellings of an address."""
    name: str = field(init=False, compare=False, repr=False)
    """`host:port`, with an IPv6 host in brackets. Used as metric label, in logs and as Host header."""
    key: str = field(init=False, compare=False, repr=False)
    """Role and address as a string. It is a faster dict key than the backend, whose hash is a call of Python code."""
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Computed once, because each request uses them many times.
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
        """Return the base URL without a path, for example `http://10.0.0.1:7100`."""
        return engine_url(self.host, self.port, tls=self.tls)
