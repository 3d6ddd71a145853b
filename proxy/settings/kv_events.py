"""Options of KV events, which engines publish about their prefix caches."""

# No `from __future__ import annotations` here: pydantic reads the annotations at run time.
import re
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator

from proxy.settings.kinds import Positive, empty_is_none
from proxy.settings.section import Section

ASK: Final = "auto"
"""Value that means: ask engines for their endpoints."""
# The form in engines' options: any address, with a port, or with a number that is added to the instance's port.
_is_endpoint = re.compile(r"tcp://(\*|0\.0\.0\.0|\[::\]):(\+?)([0-9]{1,5})").fullmatch


def _endpoint(text: str | None) -> str | None:
    return text if text == ASK else _tcp(text, f", or {ASK}")


def _tcp(text: str | None, others: str = "") -> str | None:
    if text is not None:
        found = _is_endpoint(text)
        if not found or not 0 < int(found[3]) < 65536:
            raise ValueError(f"must be like tcp://*:5557, or tcp://*:+1000 for the instance's port and 1000{others}")
    return text


def port_at(endpoint: str, port: int) -> int:
    """Return the port of the first rank of an instance with this port. Raises ValueError."""
    found = _is_endpoint(endpoint)
    assert found
    return int(found[3]) + (port if found[2] else 0)


class KvEvents(Section):
    """KV events: engines publish changes of their prefix caches, so the gateway does not have to infer them.

    Requires the extra events: pip install 'pdproxy[events]'. With endpoint auto, the other options of this section are
    ignored.
    """

    endpoint: Annotated[str | None, BeforeValidator(empty_is_none), AfterValidator(_endpoint)] = None
    """Endpoint at which engines publish KV events, as in their --kv-events-config. tcp://*:5557: this port.
    tcp://*:+1000: the port of the instance plus 1000, for several instances on one host. auto: pdproxy asks each engine
    (vLLM 0.32 and later, and SGLang). null disables KV events. Requires a restart."""
    replay_endpoint: Annotated[str | None, BeforeValidator(empty_is_none), AfterValidator(_tcp)] = None
    """Endpoint for the replay of lost events, as replay_endpoint of the engines' --kv-events-config. null disables the
    replay. Not needed with endpoint auto. Requires a restart."""
    topic: str = ""
    """Prefix of the topics that pdproxy subscribes to. If empty, it subscribes to all topics. With endpoint auto,
    engines report it. Requires a restart."""
    ranks: Positive = 1
    """Number of data-parallel ranks of an instance. They publish at consecutive ports. With endpoint auto, engines
    report them. Requires a restart."""

    @property
    def tellers(self) -> int:
        """Return the number of journal rings that KV events need."""
        return 0 if self.endpoint is None else 1
