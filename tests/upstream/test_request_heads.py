"""The heads of requests to engines, which are remembered, have in them what each request asks for."""

from __future__ import annotations

from itertools import product

from proxy.balancer.engines import EngineKeys
from proxy.common.backend import Backend, Role
from proxy.upstream.upstream import RequestHeads

HEADERS: tuple[dict[str, str], ...] = (
    {},
    {"x-request-id": "a%sb"},
    {"x-request-id": "c", "authorization": "Bearer 100%"},
    {"authorization": "", "x-odd%d": "\udcff"},
    {"authorization": "Bearer other", "x-request-id": ""},
)
BACKENDS = [
    Backend(Role.DECODE, host, 7100, is_trusted=trusted)
    for host, trusted in product(("decoder", "fe80::1%eth0"), (True, False))
]


def expected(keys: EngineKeys, backend: Backend, path: str, headers: dict[str, str]) -> list[bytes]:
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {backend.name}",
        "Content-Type: application/json",
        "Accept-Encoding: identity",
        "Content-Length: 7",
        *(f"{name}: {value}" for name, value in headers.items() if name != "authorization"),
        *(f"{name}: {value}" for name, value in keys.credential_headers(backend, headers.get("authorization")).items()),
    ]
    return sorted(line.encode("utf-8", "surrogateescape") for line in lines)


def test_head_does_not_depend_on_earlier_heads() -> None:
    keys = EngineKeys(None)
    heads = RequestHeads(keys)
    for key, _ in product((None, "k%d", "another", None), range(2)):
        keys.use_key(key)
        for backend, path, headers in product(BACKENDS, ("/v1/completions", "/odd%20path"), HEADERS):
            head = heads.render_head(backend, path, 7, headers)
            assert head.endswith(b"\r\n\r\n")
            assert sorted(head[:-4].split(b"\r\n")) == expected(keys, backend, path, headers)
