"""Instances from Kubernetes: the endpoints of services, by their EndpointSlices.

The API server is listed and watched as its clients should do:
https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
EndpointSlices are read as the reference of `discovery.k8s.io/v1` describes them:
https://kubernetes.io/docs/reference/kubernetes-api/service-resources/endpoint-slice-v1/
"""

from __future__ import annotations

import asyncio
import os
import random
import ssl
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import orjson

from proxy.common.backend import Backend, Role
from proxy.settings import Settings, parse_model_names
from proxy.upstream import read_bounded

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence

    Event = tuple[str, Mapping[str, Any]]
    """The kind of a change, and the object; of a bookmark, only its version."""
    Slice = Mapping[str, Any]
    """An EndpointSlice, as JSON has it."""

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CONNECT_SECONDS: Final = 5.0
_LIST_SECONDS: Final = 30.0
_WATCH_SECONDS: Final = 240
"""The server ends a watch after this time, and the gateway continues it. So a dead connection is noticed at the latest
a little later."""
_GRACE_SECONDS: Final = 15.0
_PAUSE_SECONDS: Final = 1.0
"""Pause before the next watch or list, for a server that ends each of them at once."""
# A faulty server must neither block the event loop nor fill the memory.
_PAGE_OBJECTS: Final = 50
_MAX_OBJECTS: Final = 10_000
_MAX_PAGES: Final = _MAX_OBJECTS // _PAGE_OBJECTS
_MAX_PAGE_BYTES: Final = 32 * 1024 * 1024
_MAX_EVENT_BYTES: Final = 4 * 1024 * 1024
_MAX_ERROR_BYTES: Final = 64 * 1024
_MIN_STATE_SECONDS: Final = 0.1
"""Time between two states. Changes in between are reported together."""
_GONE: Final = 410
_BOOKMARK: Final = "BOOKMARK"
_DELETED: Final = "DELETED"


class ApiServerError(Exception):
    """A problem of the API server, in one sentence."""


class ResourceVersionGone(ApiServerError):
    """The server has no changes since that version, so the collection must be listed again."""

    def __init__(self) -> None:
        super().__init__("the API server has no changes since that version")


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Address and credentials of the API server. None: the value that Kubernetes gives to the gateway's pod."""

    server_url: str | None
    token_file: Path | None
    ca_file: Path | None
    namespace: str | None
    pause_seconds: float = _PAUSE_SECONDS

    @asynccontextmanager
    async def open_collection(self, resource_path: str, label_selector: str) -> AsyncIterator[ObjectCollection]:
        """Return a collection of the namespace, inside `async with`. Raises ApiServerError.

        Args:
            resource_path: Group, version and kind, such as `discovery.k8s.io/v1/endpointslices`.
            label_selector: Selects objects by their labels.
        """
        url = self.server_url or _url_of_the_cluster()
        token_file = self.token_file or (_ACCOUNT / "token" if self.server_url is None else None)
        ca_file = self.ca_file or (_ACCOUNT / "ca.crt" if self.server_url is None else None)
        group, _, noun = resource_path.rpartition("/")
        namespace = self.namespace or _read_text(_ACCOUNT / "namespace")
        context = ssl.create_default_context(cadata=_read_text(ca_file) if ca_file else None)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
            resource_path = f"{url}/apis/{group}/namespaces/{namespace}/{noun}"
            yield ObjectCollection(session, resource_path, label_selector, token_file, self.pause_seconds)


class ObjectCollection:
    """Objects of one kind and namespace, selected by labels."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        selector: str,
        token_file: Path | None,
        pause_seconds: float,
    ) -> None:
        self._http_session = session
        self._url = url
        self._label_selector = selector
        self._token_file = token_file
        self._pause_seconds = pause_seconds

    async def watch_objects(self) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield the objects by name, first all and then after each change.

        Raises ApiServerError, aiohttp.ClientError or TimeoutError. The next call lists all objects again.
        """
        while True:
            objects, version = await self._list_objects()
            yield objects
            with suppress(ResourceVersionGone):
                while True:
                    async with aclosing(self._watch_changes(version)) as changes:
                        async for events in changes:
                            version = events[-1][1]["metadata"]["resourceVersion"]
                            if _apply_events(events, objects):
                                yield objects
                                await asyncio.sleep(min(_MIN_STATE_SECONDS, self._pause_seconds))
                    await asyncio.sleep(self._pause_seconds)
            await asyncio.sleep(self._pause_seconds)

    async def _list_objects(self) -> tuple[dict[str, Any], str]:
        """Return the objects by name, and the version of the list. Raises as `watch_objects`."""
        found: dict[str, Any] = {}
        parameters = {"limit": str(_PAGE_OBJECTS)}
        for _ in range(_MAX_PAGES):
            async with self._open_request(parameters, _LIST_SECONDS) as response:
                page = orjson.loads(await read_bounded(response, _MAX_PAGE_BYTES))
            found |= {one["metadata"]["name"]: one for one in page.get("items") or ()}
            _check_number(found)
            if not (more := page["metadata"].get("continue")):
                return found, page["metadata"]["resourceVersion"]
            parameters["continue"] = more
        raise ApiServerError(f"the API server's list has more than {_MAX_PAGES} pages")

    async def _watch_changes(self, resource_version: str) -> AsyncGenerator[Sequence[Event], None]:
        """Yield the changes since a version: each time at least one event, and all that have arrived together.

        Ends when the server ends the watch. Raises as `watch_objects`, and Gone.
        """
        seconds = random.randint(_WATCH_SECONDS // 2, _WATCH_SECONDS)  # so that not all gateways watch again at once
        parameters = {
            "watch": "1",
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        async with self._open_request(parameters, seconds + _GRACE_SECONDS) as response:
            async for lines in _response_lines(response):
                events: list[Event] = []
                for line in lines:
                    event = orjson.loads(line)
                    kind, changed = event["type"], event["object"]
                    if kind == "ERROR":
                        raise (
                            ResourceVersionGone
                            if changed.get("code") == _GONE
                            else _make_status_error(changed.get("code"), changed)
                        )
                    events.append((kind, changed))
                yield events

    @asynccontextmanager
    async def _open_request(
        self, parameters: Mapping[str, str], seconds: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"Accept": "application/json"}
        if self._token_file is not None:  # read for each request, because Kubernetes replaces tokens before they expire
            headers["Authorization"] = f"Bearer {_read_text(self._token_file)}"
        parameters = {"labelSelector": self._label_selector, **parameters}
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
        async with self._http_session.get(
            self._url, params=parameters, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            if response.status == _GONE:
                raise ResourceVersionGone
            if response.status != 200:
                raise _make_status_error(response.status, _json_or_none(await read_bounded(response, _MAX_ERROR_BYTES)))
            yield response


def _apply_events(watch_events: Sequence[Event], objects_by_name: dict[str, Any]) -> bool:
    """Apply changes to the objects, and return whether there were any. Raises ApiServerError."""
    has_changed = False
    for kind, changed in watch_events:
        if kind == _BOOKMARK:
            continue
        has_changed = True
        name = changed["metadata"]["name"]
        objects_by_name.pop(name, None)
        if kind != _DELETED:
            objects_by_name[name] = changed
    _check_number(objects_by_name)
    return has_changed


def _check_number(objects_by_name: Mapping[str, Any]) -> None:
    if len(objects_by_name) > _MAX_OBJECTS:
        raise ApiServerError(f"the API server names more than {_MAX_OBJECTS} objects")


async def _response_lines(response: aiohttp.ClientResponse) -> AsyncIterator[Sequence[bytes]]:
    """Yield the lines that have arrived together, at least one."""
    partial = bytearray()
    async for part in response.content.iter_any():
        *ended, rest = part.split(b"\n")
        lines: list[bytes] = []
        for line in ended:
            partial += line
            if partial:
                lines.append(bytes(partial))
            partial.clear()
        partial += rest
        if len(partial) > _MAX_EVENT_BYTES:
            raise ApiServerError("the API server sent an event without an end")
        if lines:
            yield lines


def _make_status_error(status: object, body: Any) -> ApiServerError:
    """Return the error for an answer whose body is a Status with a `message`."""
    message = body.get("message") if isinstance(body, dict) else None
    return ApiServerError(f"the API server answered {status}" + (f": {message}" if message else ""))


def _read_text(path: Path) -> str:
    """Return the text of a file. Raises ApiServerError."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ApiServerError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None


def _json_or_none(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def _url_of_the_cluster() -> str:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ApiServerError("the gateway does not run in a pod of Kubernetes: set kubernetes.api_server")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


# EndpointSlices


BOOTSTRAP: Final = "bootstrap"
BOOTSTRAP_KEY: Final = "sglang.ai/bootstrap-port"
"""The annotation or label with the bootstrap port, as SGLang's router reads it from pods (`bootstrap_port_annotation`).
Kubernetes copies labels of a service to its slices, but not annotations."""
MODEL_KEY: Final = "pdproxy/model"
"""The annotation or label with the served models. Labels of other projects, such as `llm-d.ai/model`, may have other
names than requests."""
ELASTIC_KEY: Final = "pdproxy/elastic"
"""The annotation or label that makes instances elastic if it is `true`."""
_DEFAULT_PORT: Final = "http"


def ready_instances(role: Role, endpoint_slices: Iterable[Slice], port_name: str | None) -> list[Backend]:
    """Return the endpoints that are ready and not terminating.

    If none is ready, the result has all that are not terminating: then the probes of Kubernetes are the likely problem,
    and the gateway has its own. Raises ValueError if the engines' port in a slice is not clear.
    """
    found: dict[object, tuple[bool, list[Backend]]] = {}
    # A pod with IPv4 and IPv6 addresses is in two slices, but is one instance. An endpoint may also be in two slices
    # while Kubernetes rearranges them. Pods in the network of their node share its address and differ by port.
    for one in sorted(endpoint_slices, key=lambda one: (one.get("addressType", ""), one["metadata"]["name"])):
        endpoints = [endpoint for endpoint in one.get("endpoints") or () if not _is_terminating(endpoint)]
        if endpoints:
            is_elastic = _annotation(one, ELASTIC_KEY) == "true"
            may_prefill = role is Role.PREFILL or is_elastic
            ports, bootstrap_port = _engine_ports(one, port_name), _parse_bootstrap_port(one) if may_prefill else None
            models = _parse_models(one)
            secured = {port["port"] for port in one.get("ports") or () if port.get("appProtocol") == "https"}
            for endpoint in endpoints:
                host = endpoint["addresses"][0]  # all are equivalent, and clients should use the first
                backends = [
                    Backend(
                        role,
                        host,
                        port,
                        is_trusted=True,
                        bootstrap_port=bootstrap_port,
                        models=models,
                        tls=port in secured,
                        is_elastic=is_elastic,
                    )
                    for port in ports
                ]
                target = endpoint.get("targetRef") or {}
                found.setdefault((target.get("uid") or host, *ports), (_is_ready(endpoint), backends))
    ready = [backend for is_ready, backends in found.values() if is_ready for backend in backends]
    return ready or [backend for _, backends in found.values() for backend in backends]


def _is_ready(endpoint: Mapping[str, Any]) -> bool:
    """Return whether an endpoint is ready. A missing condition means that it is."""
    return (endpoint.get("conditions") or {}).get("ready") is not False


def _is_terminating(endpoint: Mapping[str, Any]) -> bool:
    return (endpoint.get("conditions") or {}).get("terminating") is True


def _engine_ports(endpoint_slice: Slice, port_name: str | None) -> Sequence[int]:
    """Return the ports of engines. Raises ValueError."""
    ports = {port.get("name") or "": port["port"] for port in endpoint_slice.get("ports") or () if port.get("port")}
    if port_name is not None:
        fitting = [port for name, port in ports.items() if fnmatchcase(name, port_name)]
    else:
        engines = {name: port for name, port in ports.items() if name != BOOTSTRAP}
        fitting = (
            list(engines.values())
            if len(engines) == 1
            else [port for name, port in engines.items() if name == _DEFAULT_PORT]
        )
    if not fitting:
        name = endpoint_slice["metadata"]["name"]
        among = ", ".join(map(repr, ports)) or "none"
        raise ValueError(
            f"EndpointSlice {name}: no port is clearly that of engines: set kubernetes.port_name to one of {among}"
        )
    return fitting


def _parse_bootstrap_port(endpoint_slice: Slice) -> int | None:
    """Return the bootstrap port, or None if there is none. Raises ValueError."""
    for port in endpoint_slice.get("ports") or ():
        if port.get("name") == BOOTSTRAP:
            return int(port["port"])
    word = _annotation(endpoint_slice, BOOTSTRAP_KEY)
    if word is None:
        return None
    if not (word.isdecimal() and 1 <= int(word) <= 65535):
        raise ValueError(f"{BOOTSTRAP_KEY} of EndpointSlice {endpoint_slice['metadata']['name']} must be a port")
    return int(word)


def _parse_models(endpoint_slice: Slice) -> tuple[str, ...]:
    """Return the served models. Raises ValueError."""
    try:
        return parse_model_names(_annotation(endpoint_slice, MODEL_KEY) or "")
    except ValueError as error:
        raise ValueError(f"{MODEL_KEY} of EndpointSlice {endpoint_slice['metadata']['name']}: {error}") from None


def _annotation(endpoint_slice: Slice, annotation_name: str) -> str | None:
    """Return the value of an annotation or label, or None if there is none."""
    metadata = endpoint_slice["metadata"]
    return (metadata.get("annotations") or {}).get(annotation_name) or (metadata.get("labels") or {}).get(
        annotation_name
    )


_SLICES: Final = "discovery.k8s.io/v1/endpointslices"


@dataclass(frozen=True, slots=True)
class WatchedSlices:
    """The EndpointSlices of one role. A Source; the fields are those of the settings."""

    role: Role
    label_selector: str
    api_server: ApiServer
    port_name: str | None

    @property
    def source_name(self) -> str:
        """The role, because each role has one source."""
        return self.role

    async def watch_instances(self) -> AsyncGenerator[Sequence[Backend], None]:
        async with (
            self.api_server.open_collection(_SLICES, self.label_selector) as collection,
            aclosing(collection.watch_objects()) as states,
        ):
            async for slices in states:
                yield ready_instances(self.role, slices.values(), self.port_name)


def watched_slices(settings: Settings) -> Iterator[WatchedSlices]:
    """Return the sources of this kind in the settings."""
    options = settings.kubernetes
    server = ApiServer(options.api_server, options.token_file, options.ca_file, options.namespace)
    for role, selector in options.selectors.items():
        yield WatchedSlices(Role(role), selector, server, options.port_name)
