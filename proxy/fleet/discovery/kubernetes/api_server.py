"""Listing and watching one collection of objects at Kubernetes' API server, as its clients are told to:
https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
"""

from __future__ import annotations

import asyncio
import os
import random
import ssl
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import orjson

from proxy.upstream import read_bounded

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

    Event = tuple[str, Mapping[str, Any]]
    """The kind of a change and the object, or of a bookmark only its version."""

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CONNECT_SECONDS: Final = 5.0
_LIST_SECONDS: Final = 30.0
_WATCH_SECONDS: Final = 240
"""After this long the server ends a watch, which is then begun again where it was. A connection that has died without a
word is noticed a little later."""
_GRACE_SECONDS: Final = 15.0
_PAUSE_SECONDS: Final = 1.0
"""Before the next watch, or list: a server that ends each of them at once is not asked at full speed."""
# A server that is sick, or is another one than it seems, must neither hold up the event loop nor fill the memory.
_PAGE: Final = 50
_MAX_OBJECTS: Final = 10_000
_MAX_PAGES: Final = _MAX_OBJECTS // _PAGE
_MAX_PAGE_BYTES: Final = 32 * 1024 * 1024
_MAX_EVENT_BYTES: Final = 4 * 1024 * 1024
_MAX_ERROR_BYTES: Final = 64 * 1024
_LEAST_SECONDS: Final = 0.1
"""Between two states: what changes meanwhile is told together."""
_GONE: Final = 410
_BOOKMARK: Final = "BOOKMARK"
_DELETED: Final = "DELETED"


class ApiServerError(Exception):
    """The text is one sentence."""


class Gone(ApiServerError):
    """What was asked for is too old to be told from there on: list again."""

    def __init__(self) -> None:
        super().__init__("the API server does not remember as far back as that")


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where it is, and as whom it is asked. None: as the pod is told that this runs in."""

    url: str | None
    token_file: Path | None
    ca_file: Path | None
    namespace: str | None
    pause_seconds: float = _PAUSE_SECONDS

    @asynccontextmanager
    async def collection(self, path: str, selector: str) -> AsyncIterator[Collection]:
        """Of the namespace: `path` is, say, `discovery.k8s.io/v1/endpointslices`. Raises ApiServerError."""
        url = self.url or _url_of_the_cluster()
        token_file = self.token_file or (_ACCOUNT / "token" if self.url is None else None)
        ca_file = self.ca_file or (_ACCOUNT / "ca.crt" if self.url is None else None)
        group, _, noun = path.rpartition("/")
        namespace = self.namespace or _read(_ACCOUNT / "namespace")
        context = ssl.create_default_context(cadata=_read(ca_file) if ca_file else None)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
            path = f"{url}/apis/{group}/namespaces/{namespace}/{noun}"
            yield Collection(session, path, selector, token_file, self.pause_seconds)


class Collection:
    """Objects of one kind in one namespace that have certain labels."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        selector: str,
        token_file: Path | None,
        pause_seconds: float,
    ) -> None:
        self._session = session
        self._url = url
        self._selector = selector
        self._token_file = token_file
        self._pause_seconds = pause_seconds

    async def states(self) -> AsyncGenerator[Mapping[str, Any], None]:
        """The objects by name, at first and after each change. Raises ApiServerError, aiohttp.ClientError or
        TimeoutError; what was missed then the next call makes good by a new list.
        """
        while True:
            objects, version = await self._list()
            yield objects
            with suppress(Gone):
                while True:
                    async with aclosing(self._changes(version)) as changes:
                        async for events in changes:
                            version = events[-1][1]["metadata"]["resourceVersion"]
                            if _apply(events, objects):
                                yield objects
                                await asyncio.sleep(min(_LEAST_SECONDS, self._pause_seconds))
                    await asyncio.sleep(self._pause_seconds)
            await asyncio.sleep(self._pause_seconds)

    async def _list(self) -> tuple[dict[str, Any], str]:
        """The objects by name, and the version of all. Raises as `states`."""
        found: dict[str, Any] = {}
        parameters = {"limit": str(_PAGE)}
        for _ in range(_MAX_PAGES):
            async with self._get(parameters, _LIST_SECONDS) as response:
                page = orjson.loads(await read_bounded(response, _MAX_PAGE_BYTES))
            found |= {one["metadata"]["name"]: one for one in page.get("items") or ()}
            _check_number(found)
            if not (more := page["metadata"].get("continue")):
                return found, page["metadata"]["resourceVersion"]
            parameters["continue"] = more
        raise ApiServerError(f"the API server's list has more than {_MAX_PAGES} pages")

    async def _changes(self, since: str) -> AsyncGenerator[Sequence[Event], None]:
        """Yield what has changed since a version, as many events together as have arrived, at least one.

        It ends when the server ends it. Raises as `states`, and Gone.
        """
        seconds = random.randint(_WATCH_SECONDS // 2, _WATCH_SECONDS)  # not all gateways at one time
        parameters = {
            "watch": "1",
            "resourceVersion": since,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        async with self._get(parameters, seconds + _GRACE_SECONDS) as response:
            async for lines in _lines(response):
                events: list[Event] = []
                for line in lines:
                    event = orjson.loads(line)
                    kind, told = event["type"], event["object"]
                    if kind == "ERROR":
                        raise Gone if told.get("code") == _GONE else _error(told.get("code"), told)
                    events.append((kind, told))
                yield events

    @asynccontextmanager
    async def _get(self, parameters: Mapping[str, str], seconds: float) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"Accept": "application/json"}
        if self._token_file is not None:  # read each time: tokens expire, and are written anew before that
            headers["Authorization"] = f"Bearer {_read(self._token_file)}"
        parameters = {"labelSelector": self._selector, **parameters}
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
        async with self._session.get(
            self._url, params=parameters, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            if response.status == _GONE:
                raise Gone
            if response.status != 200:
                raise _error(response.status, _json_or_none(await read_bounded(response, _MAX_ERROR_BYTES)))
            yield response


def _apply(events: Sequence[Event], objects: dict[str, Any]) -> bool:
    """Make the changes in the objects; whether there were any. Raises ApiServerError."""
    has_changed = False
    for kind, told in events:
        if kind == _BOOKMARK:
            continue
        has_changed = True
        name = told["metadata"]["name"]
        objects.pop(name, None)
        if kind != _DELETED:
            objects[name] = told
    _check_number(objects)
    return has_changed


def _check_number(objects: Mapping[str, Any]) -> None:
    if len(objects) > _MAX_OBJECTS:
        raise ApiServerError(f"the API server names more than {_MAX_OBJECTS} objects")


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[Sequence[bytes]]:
    """The lines that have arrived together, at least one."""
    begun = bytearray()
    async for part in response.content.iter_any():
        *ended, rest = part.split(b"\n")
        lines: list[bytes] = []
        for line in ended:
            begun += line
            if begun:
                lines.append(bytes(begun))
            begun.clear()
        begun += rest
        if len(begun) > _MAX_EVENT_BYTES:
            raise ApiServerError("the API server sent an event without an end")
        if lines:
            yield lines


def _error(status: object, told: Any) -> ApiServerError:
    """By the `message` of the Status that the server answers with."""
    message = told.get("message") if isinstance(told, dict) else None
    return ApiServerError(f"the API server answered {status}" + (f": {message}" if message else ""))


def _read(path: Path) -> str:
    """Raises ApiServerError."""
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
        raise ApiServerError("this is no pod of Kubernetes: set kubernetes.api_server")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
