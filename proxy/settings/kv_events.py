"""The options of those who hear what engines publish of their KV caches."""

# No `from __future__ import annotations` here: pydantic reads the annotations at run time.
import re
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator

from proxy.settings.kinds import Positive, empty_is_none
from proxy.settings.section import Section

ASK: Final = "auto"
"""Engines are asked where they publish."""
# As engines are told to listen there, whatever the address is called then; or the instance's port and so many.
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
    """The first rank's port, of an instance whose own port is this."""
    found = _is_endpoint(endpoint)
    assert found
    return int(found[3]) + (port if found[2] else 0)


class KvEvents(Section):
    """KV events: engines tell at once what is in their prefix caches and what is evicted, so that the gateway need not
    learn it. Needs the extra events: pip install 'pdproxy[events]'. With endpoint auto the others do not count.
    """

    endpoint: Annotated[str | None, BeforeValidator(empty_is_none), AfterValidator(_endpoint)] = None
    """Where engines publish: the endpoint of their --kv-events-config, as tcp://*:5557; tcp://*:+1000: the instance's
    port and 1000, where several are on one host; auto: each is asked (vLLM from 0.32 on and SGLang tell); null: no
    events are heard."""
    replay_endpoint: Annotated[str | None, BeforeValidator(empty_is_none), AfterValidator(_tcp)] = None
    """The replay_endpoint of their --kv-events-config, where lost events are asked for; null: there is none.
    Not needed with endpoint auto."""
    topic: str = ""
    """Only events whose topic begins with this are heard; empty: all. With endpoint auto engines tell it."""
    ranks: Positive = 1
    """Data-parallel ranks of an instance, which publish at ports one behind the other; with auto they tell them."""

    @property
    def tellers(self) -> int:
        """How many rings of the journal they need."""
        return 0 if self.endpoint is None else 1
