"""What a roll asks of the gateways that share the engines, and what it has them do."""

from __future__ import annotations

import http.client
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

import orjson
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

_TIMEOUT_SECONDS: Final = 10.0
_PATIENCE_SECONDS: Final = 30.0
"""How long a gateway may be away, such as while it is replaced."""
_PAUSE_SECONDS: Final = 0.5
_MOST_BYTES: Final = 64 * 1024 * 1024
_COUNTED: Final = re.compile(r"pdproxy_(requests|streams_broken)_total\{")


class GatewayTrouble(Exception):
    """A gateway does not answer, or refuses what it is asked for; the text is one sentence."""


@dataclass(frozen=True, slots=True)
class Instance:
    """What the gateways know of one instance, taken together."""

    address: str
    is_disabled: bool
    """One of them gives it nothing new, as an administrator has said."""
    serves: bool
    """All workers of all of them give it requests, as they have found it well."""
    inflight: int
    """Requests there, of all of them."""
    models: frozenset[str] = frozenset()
    """What it serves; empty: that is not known."""


class Gateways:
    """All that share the engines, at least one. What is done is done at each of them."""

    def __init__(self, urls: Sequence[str], role: str, key: str | None) -> None:
        """`urls`: where each has its administration. `key`: for administration; None: none is needed."""
        self._urls = [url.rstrip("/") for url in urls]
        self._role = role
        self._headers = {} if key is None else {"X-Admin-Key": key}
        self._failures: dict[str, float] = {}
        self._counted = 0.0

    def instances(self) -> list[Instance]:
        """The instances of the role that all gateways have and that do not drain, in their order. Raises
        GatewayTrouble.
        """
        views = [self._view(url) for url in self._urls]
        common = [address for address in views[0] if all(address in view for view in views)]
        with _understanding("one of the gateways' /instances"):
            return [_together(address, [view[address] for view in views]) for address in common]

    def disable(self, address: str, evacuate_after: float | None, *, is_dry_run: bool = False) -> list[str]:
        """Give an instance nothing new, and have it evacuated after so many seconds; None: as the gateways are set.
        What they warn of. Raises GatewayTrouble.
        """
        asked = {} if evacuate_after is None else {"evacuate_after": evacuate_after}
        return self._change(f"disable{'?dry_run=true' if is_dry_run else ''}", address, **asked)

    def enable(self, address: str) -> None:
        """Let it have requests again. Raises GatewayTrouble."""
        self._change("enable", address)

    def failures(self) -> int:
        """Requests that clients saw fail since this was asked for the first time: 5xx, and answers that broke off.
        Raises GatewayTrouble.
        """
        for url in self._urls:
            now = _failed(self._ask(url, "/metrics").decode(errors="replace"))
            before = self._failures.get(url, now)
            self._counted += now - before if now >= before else now  # it may be another process since
            self._failures[url] = now
        return round(self._counted)

    # How

    def _view(self, url: str) -> dict[str, Mapping[str, Any]]:
        with _understanding(f"{url}/instances"):
            return {
                one["address"]: one
                for one in orjson.loads(self._ask(url, "/instances"))["instances"]
                if one["role"] == self._role and one["membership"] in ("enabled", "disabled")
            }

    def _change(self, what: str, address: str, **fields: object) -> list[str]:
        warnings: list[str] = []
        for url in self._urls:
            body = orjson.dumps({"type": self._role, "instances": address, **fields})
            with _understanding(f"{url}/instances/{what}"):
                told = orjson.loads(self._ask(url, f"/instances/{what}", body))
                if told["not_found"]:
                    raise GatewayTrouble(f"{url} has no {self._role} instance {address} any more")
                warnings += told["warnings"]
        return warnings

    def _ask(self, url: str, path: str, body: bytes | None = None) -> bytes:
        """Of what is asked here all may be said twice, so it is, while nobody answers. Raises GatewayTrouble."""
        request = Request(url + path, data=body, headers=self._headers)
        return _patiently(lambda: _answer(request), f"{url} does not answer")


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """No: the admin key would go along."""


_open: Final = build_opener(ProxyHandler({}), _NoRedirects()).open  # past any proxy, which would have the key, too


def _answer(request: Request) -> bytes:
    try:
        with _open(request, timeout=_TIMEOUT_SECONDS) as answer:
            return bytes(answer.read(_MOST_BYTES))
    except HTTPError as error:
        with error:
            raise GatewayTrouble(f"{request.full_url} answers {error.code}: {_said(error.read(_MOST_BYTES))}") from None


@contextmanager
def _understanding(where: str) -> Iterator[None]:
    """What is read in the block is what a gateway says. Raises GatewayTrouble."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError):
        raise GatewayTrouble(f"{where} does not answer as a gateway's does") from None


def _said(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return "no gateway says that"


def _patiently(ask: Callable[[], bytes], problem: str) -> bytes:
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return ask()
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() >= until:
                raise GatewayTrouble(f"{problem}: {getattr(error, 'reason', error)}") from None
        time.sleep(_PAUSE_SECONDS)


def lost_without(away: Instance, others: Iterable[Instance]) -> frozenset[str]:
    """What nobody serves while one is away. Another one of which it is not known may serve any of it."""
    theirs = [other.models for other in others]
    return away.models.difference(*theirs) if all(theirs) else frozenset()


def _together(address: str, views: Sequence[Mapping[str, Any]]) -> Instance:
    return Instance(
        address=address,
        is_disabled=any(view["membership"] == "disabled" for view in views),
        serves=all(view["membership"] == "enabled" and view["states"].keys() == {"up"} for view in views),
        inflight=sum(view["load"]["inflight"] for view in views),
        models=frozenset[str]().union(*(view.get("models") or () for view in views)),
    )


def _failed(exposition: str) -> float:
    """How many requests clients saw fail, by a gateway's metrics."""
    text = "".join(line for line in exposition.splitlines(keepends=True) if _COUNTED.match(line))
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("code", "").startswith("5") or sample.labels.get("side", "client") != "client"
    )
