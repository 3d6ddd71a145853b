"""Simulates the Kubernetes API for lists and watches of EndpointSlices.

Versions, pages, bookmarks and expiry follow https://kubernetes.io/docs/reference/using-api/api-concepts/.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import orjson
from aiohttp import web

NAMESPACE = "engines"
PATH = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"


def endpoint_slice(
    name: str, *addresses: str, port: int = 8000, labels: dict[str, str] | None = None, **more: Any
) -> dict[str, Any]:
    """Return a slice whose endpoints are ready."""
    return {
        "metadata": {"name": name, "labels": labels or {"kubernetes.io/service-name": name}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}} for address in addresses],
        **more,
    }


class KubernetesServer:
    """Serves the slices inside `async with`."""

    def __init__(self) -> None:
        self.lists = 0
        """Number of requested pages."""
        self.watches: list[str] = []
        """Versions from which watches were started."""
        self.page = 500
        """Maximum number of objects in a page."""
        self.is_endless = False
        """Whether every page announces another one."""
        self.token: str | None = None
        """Token that clients must send; None: no token is required."""
        self.refusal: tuple[int, str] | None = None
        """Status and message of all answers; None: the server works."""
        self._slices: dict[str, dict[str, Any]] = {}
        self._version = 100
        self._events: list[tuple[int, dict[str, Any]]] = []
        self._oldest = 100
        self._open: set[asyncio.Queue[bytes | None]] = set()
        self.url = ""

    # What happens in the cluster

    def put(self, one: dict[str, Any]) -> None:
        """Create or change a slice."""
        name = one["metadata"]["name"]
        kind = "MODIFIED" if name in self._slices else "ADDED"
        self._slices[name] = one
        self._record(kind, one)

    def delete(self, name: str) -> None:
        self._record("DELETED", self._slices.pop(name))

    def bookmark(self) -> None:
        """Send watches a bookmark with a later version, as after changes of other objects."""
        self._version += 10
        self._send({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self._version)}}})

    def forget(self) -> None:
        """Let all versions until now expire. Open watches continue."""
        self._events.clear()
        self._oldest = self._version

    def end_watches(self, error: dict[str, Any] | None = None) -> None:
        """End all watches, as after timeoutSeconds, or with an error event."""
        if error is not None:
            self._send({"type": "ERROR", "object": error})
        for queue in self._open:
            queue.put_nowait(None)

    @property
    def watching(self) -> int:
        return len(self._open)

    def _record(self, kind: str, one: dict[str, Any]) -> None:
        self._version += 1
        metadata = {**one["metadata"], "resourceVersion": str(self._version)}
        event = {"type": kind, "object": {**one, "metadata": metadata}}
        self._events.append((self._version, event))
        self._send(event)

    def _send(self, event: dict[str, Any]) -> None:
        for queue in self._open:
            queue.put_nowait(orjson.dumps(event))

    # Requests of clients

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
                    event = orjson.loads(line)
                    if event["type"] in ("BOOKMARK", "ERROR") or _fits(event["object"], selector):
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
    """Return the status that ends a watch whose version has expired."""
    return {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version: 1 (2)"}
