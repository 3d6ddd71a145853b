"""Questions and commands of a roll to the gateways that share the engines."""

from __future__ import annotations

import http.client
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

import orjson
from prometheus_client.parser import text_string_to_metric_families

from proxy.common.blocking_http import describe_request_error

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

_TIMEOUT_SECONDS: Final = 10.0
_PATIENCE_SECONDS: Final = 30.0
"""time that a gateway may be away, for example during its replacement"""
_PAUSE_SECONDS: Final = 0.5
_MOST_BYTES: Final = 64 * 1024 * 1024
_COUNTED: Final = re.compile(r"pdproxy_(requests|streams_broken)_total\{")


class GatewayProblem(Exception):
    """A gateway does not answer, or refuses a command. The text is one sentence."""


@dataclass(frozen=True, slots=True)
class RollInstance:
    """One instance, as all gateways together report it."""

    address: str
    is_disabled: bool
    """Whether an administrator has disabled it at a gateway."""
    serves: bool
    """Whether all workers of all gateways send it requests, because it is healthy."""
    inflight: int
    """Its requests in flight, from all gateways."""
    models: frozenset[str] = frozenset()
    """Its models; empty if not known."""
    is_elastic: bool = False
    """Whether all gateways can move it to another role."""
    is_moving: bool = False
    """Whether a gateway moves it to another role."""
    problem: str = ""
    """Why its last move failed at a gateway. Empty: it did not."""


class GatewayGroup:
    """All gateways that share the engines, at least one. Commands are sent to each of them."""

    def __init__(self, urls: Sequence[str], role: str, key: str | None, tls: ssl.SSLContext | None = None) -> None:
        """Create the gateways.

        Args:
            urls: Address of each gateway's administration.
            role: Role of the instances.
            key: Key for administration; None without one.
            tls: Context for addresses with https://; None: the defaults.
        """
        # Without a proxy, which would get the key, too.
        self._open = build_opener(ProxyHandler({}), HTTPSHandler(context=tls), _NoRedirects()).open
        self._urls = [url.rstrip("/") for url in urls]
        self.role = role
        """Role of the instances."""
        self._headers = {} if key is None else {"X-Admin-Key": key}
        self._failures: dict[str, float] = {}
        self._counted = 0.0

    def instances(self) -> list[RollInstance]:
        """Return the instances of the role that all gateways have and that do not drain, in their order.

        Raises GatewayProblem.
        """
        views = [self._view(url) for url in self._urls]
        common = [address for address in views[0] if all(address in view for view in views)]
        with _parsing_answers("one of the gateways' /instances"):
            return [_merged_instance(address, [view[address] for view in views]) for address in common]

    def disable(self, address: str, evacuate_after: float | None, *, is_dry_run: bool = False) -> list[str]:
        """Disable an instance, and evacuate it later; return the gateways' warnings. Raises GatewayProblem.

        `evacuate_after` None: the gateways' setting.
        """
        asked = {} if evacuate_after is None else {"evacuate_after": evacuate_after}
        return self._change(f"disable{'?dry_run=true' if is_dry_run else ''}", address, **asked)

    def enable(self, address: str) -> None:
        """Enable an instance. Raises GatewayProblem."""
        self._change("enable", address)

    def move(self, address: str, to: str, evacuate_after: float | None, *, is_dry_run: bool = False) -> list[str]:
        """Order a role for an elastic instance, and return the steps of the move. Raises GatewayProblem.

        `evacuate_after` None: the gateways' setting.
        """
        asked = {} if evacuate_after is None else {"evacuate_after": evacuate_after}
        steps: list[str] = []
        for url in self._urls:
            path = f"/instances/role{'?dry_run=true' if is_dry_run else ''}"
            body = orjson.dumps({"role": to, "instances": address, **asked})
            with _parsing_answers(f"{url}/instances/role"):
                told = orjson.loads(self._ask(url, path, body))
                if told["not_found"]:
                    raise GatewayProblem(f"{url} has no instance {address} any more")
                steps = [step for plan in told["plan"] for step in plan["steps"]]
        return steps

    def failures(self) -> int:
        """Return the number of requests that failed for clients since the first call. Raises GatewayProblem.

        Failures are statuses 5xx, and broken answers.
        """
        for url in self._urls:
            now = _count_failed_requests(self._ask(url, "/metrics").decode(errors="replace"))
            before = self._failures.get(url, now)
            self._counted += now - before if now >= before else now  # another process may answer in the meantime
            self._failures[url] = now
        return round(self._counted)

    # Requests to gateways

    def _view(self, url: str) -> dict[str, Mapping[str, Any]]:
        with _parsing_answers(f"{url}/instances"):
            return {
                one["address"]: one
                for one in orjson.loads(self._ask(url, "/instances"))["instances"]
                if one["role"] == self.role and one["membership"] in ("enabled", "disabled")
            }

    def _change(self, what: str, address: str, **fields: object) -> list[str]:
        warnings: list[str] = []
        for url in self._urls:
            body = orjson.dumps({"type": self.role, "instances": address, **fields})
            with _parsing_answers(f"{url}/instances/{what}"):
                told = orjson.loads(self._ask(url, f"/instances/{what}", body))
                if told["not_found"]:
                    raise GatewayProblem(f"{url} has no {self.role} instance {address} any more")
                warnings += told["warnings"]
        return warnings

    def _ask(self, url: str, path: str, body: bytes | None = None) -> bytes:
        """Send a request, and repeat it while no gateway answers, because all requests here are idempotent.

        Raises GatewayProblem.
        """
        request = Request(url + path, data=body, headers=self._headers)
        return _retry_on_failure(lambda: self._answer(request), f"{url} does not answer")

    def _answer(self, request: Request) -> bytes:
        try:
            with self._open(request, timeout=_TIMEOUT_SECONDS) as answer:
                return bytes(answer.read(_MOST_BYTES))
        except HTTPError as error:
            with error:
                said = _error_message(error.read(_MOST_BYTES))
                remedy = "; if the gateway has an admin.port, give that port in --url" if error.code == 404 else ""
                raise GatewayProblem(f"{request.full_url} answers {error.code}: {said}{remedy}") from None


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Refuse redirects, because the admin key would be sent along."""


@contextmanager
def _parsing_answers(where: str) -> Iterator[None]:
    """Read a gateway's answer inside this context. Raises GatewayProblem."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError):
        raise GatewayProblem(f"{where} does not answer like a gateway") from None


def _error_message(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return "no gateway says that"


def _retry_on_failure(ask: Callable[[], bytes], problem: str) -> bytes:
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return ask()
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() >= until:
                reason = describe_request_error(getattr(error, "reason", error))
                raise GatewayProblem(f"{problem}: {reason}") from None
        time.sleep(_PAUSE_SECONDS)


def models_lost_without(away: RollInstance, others: Iterable[RollInstance]) -> frozenset[str]:
    """Return the models that only this instance serves. An instance with unknown models may serve any."""
    theirs = [other.models for other in others]
    return away.models.difference(*theirs) if all(theirs) else frozenset()


def _merged_instance(address: str, views: Sequence[Mapping[str, Any]]) -> RollInstance:
    elastic = [view["elastic"] for view in views if view.get("elastic") is not None]
    return RollInstance(
        address=address,
        is_disabled=any(view["membership"] == "disabled" for view in views),
        serves=all(view["membership"] == "enabled" and view["states"].keys() == {"up"} for view in views),
        inflight=sum(view["load"]["inflight"] for view in views),
        models=frozenset[str]().union(*(view.get("models") or () for view in views)),
        is_elastic=len(elastic) == len(views),
        is_moving=any(each["moves_to"] is not None for each in elastic),
        problem=next((str(each["last_problem"]) for each in elastic if each["last_problem"]), ""),
    )


def _count_failed_requests(exposition: str) -> float:
    """Return the number of failed requests in a gateway's metrics."""
    text = "".join(line for line in exposition.splitlines(keepends=True) if _COUNTED.match(line))
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("code", "").startswith("5") or sample.labels.get("side", "client") != "client"
    )
