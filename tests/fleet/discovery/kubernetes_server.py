"""An API server of Kubernetes, as far as EndpointSlices are listed and watched, simulated in this process.

Versions, pages, bookmarks and expiry are as https://kubernetes.io/docs/reference/using-api/api-concepts/ has them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import orjson
from aiohttp import web

if TYPE_CHECKING:
    from types import TracebackType

NAMESPACE = "engines"
PATH = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"


def endpoint_slice(
    name: str, *addresses: str, port: int = 8000, labels: dict[str, str] | None = None, **more: Any
) -> dict[str, Any]:
    """One whose endpoints are ready."""
    return {
        "metadata": {"name": name, "labels": labels or {"kubernetes.io/service-name": name}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}} for address in addresses],
        **more,
    }


class KubernetesServer:
    """`async with` it."""

    def __init__(self) -> None:
        self.lists = 0
        """Pages that were asked for."""
        self.watches: list[str] = []
        """The versions from which they were begun."""
        self.page = 500
        """Most objects of a page, whatever is asked for."""
        self.is_endless = False
        """Every page says that there are more."""
        self.token: str | None = None
        """That of those who may ask."""
        self.refusal: tuple[int, str] | None = None
        """Everything is answered with this status and message."""
        self._slices: dict[str, dict[str, Any]] = {}
        self._version = 100
        self._events: list[tuple[int, dict[str, Any]]] = []
        self._oldest = 100
        self._open: set[asyncio.Queue[bytes | None]] = set()
        self.url = ""

    # What happens in the cluster

    def put(self, one: dict[str, Any]) -> None:
        """A slice is made, or changed."""
        name = one["metadata"]["name"]
        kind = "MODIFIED" if name in self._slices else "ADDED"
        self._slices[name] = one
        self._happened(kind, one)

    def delete(self, name: str) -> None:
        self._happened("DELETED", self._slices.pop(name))

    def bookmark(self) -> None:
        """Tell watches how far the collection has come: other objects have changed, too."""
        self._version += 10
        self._tell({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self._version)}}})

    def forget(self) -> None:
        """What has happened so far cannot be told any more; nobody's watch is ended by that."""
        self._events.clear()
        self._oldest = self._version

    def end_watches(self, error: dict[str, Any] | None = None) -> None:
        """As the server does after timeoutSeconds; or they break off with an error."""
        if error is not None:
            self._tell({"type": "ERROR", "object": error})
        for queue in self._open:
            queue.put_nowait(None)

    @property
    def watching(self) -> int:
        return len(self._open)

    def _happened(self, kind: str, one: dict[str, Any]) -> None:
        self._version += 1
        metadata = {**one["metadata"], "resourceVersion": str(self._version)}
        event = {"type": kind, "object": {**one, "metadata": metadata}}
        self._events.append((self._version, event))
        self._tell(event)

    def _tell(self, event: dict[str, Any]) -> None:
        for queue in self._open:
            queue.put_nowait(orjson.dumps(event))

    # What clients ask

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.add_routes([web.get(PATH, self._get)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_watches()
        await self._runner.cleanup()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if self.refusal is not None:
            return _status(*self.refusal)
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        selector = dict(part.split("=") for part in request.query["labelSelector"].split(","))
        if "watch" in request.query:
            return await self._watch(request, selector)
        self.lists += 1
        fitting = [one for one in self._slices.values() if _fits(one, selector)]
        begin, end = int(request.query.get("continue", 0)), min(self.page, int(request.query["limit"]))
        page = fitting[begin : begin + end]
        more = str(begin + end) if begin + end < len(fitting) or self.is_endless else ""
        metadata = {"resourceVersion": str(self._version), "continue": more}
        return web.json_response({"kind": "EndpointSliceList", "metadata": metadata, "items": page or None})

    async def _watch(self, request: web.Request, selector: dict[str, str]) -> web.StreamResponse:
        since = request.query["resourceVersion"]
        self.watches.append(since)
        if int(since) < self._oldest:
            return _status(410, "too old resource version")
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        for version, event in self._events:
            if version > int(since):
                queue.put_nowait(orjson.dumps(event))
        response = web.StreamResponse()
        await response.prepare(request)
        self._open.add(queue)
        try:
            with suppress(ConnectionError):
                while (line := await queue.get()) is not None:
                    told = orjson.loads(line)
                    if told["type"] in ("BOOKMARK", "ERROR") or _fits(told["object"], selector):
                        await response.write(line + b"\n")
        finally:
            self._open.remove(queue)
        return response


def _fits(one: dict[str, Any], selector: dict[str, str]) -> bool:
    labels = one["metadata"].get("labels") or {}
    return all(labels.get(name) == value for name, value in selector.items())


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)


def gone() -> dict[str, Any]:
    """As a watch is told that its version has expired meanwhile."""
    return {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version: 1 (2)"}
