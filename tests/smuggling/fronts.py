"""Real proxies on loopback in front of the gateway, as lenient as their settings allow.

They mark every request that they send with a header that no client knows. The marks count their requests.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lab.common.toxics import Direction, ToxicProxy
from tests.asking import until

MARK: Final = f"X-HttpListener-{secrets.token_hex(8)}"

_NGINX: Final = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/log crit;
events {{ worker_connections 256; }}
http {{
  access_log off; ignore_invalid_headers off; underscores_in_headers on; client_max_body_size 0;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream gateway {{ server 127.0.0.1:{target}; keepalive 4; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://gateway; proxy_http_version 1.1; proxy_request_buffering off; proxy_buffering off;
      proxy_set_header Connection ""; proxy_set_header {mark} 1;
    }}
  }}
}}
"""

_HAPROXY: Final = """
defaults
  mode http
  timeout connect 2s
  timeout client 5s
  timeout server 5s
frontend clients
  bind 127.0.0.1:{port}
  option accept-invalid-http-request
  http-request set-header {mark} 1
  default_backend gateway
backend gateway
  http-reuse always
  server gateway 127.0.0.1:{target}
"""

_CADDY: Final = """
{{
  admin off
  auto_https off
}}
http://:{port} {{
  bind 127.0.0.1
  reverse_proxy 127.0.0.1:{target} {{
    header_up {mark} 1
    flush_interval -1
  }}
}}
"""

_ENVOY: Final = """
static_resources:
  listeners:
    - address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }}
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: clients
                common_http_protocol_options: {{ headers_with_underscores_action: ALLOW }}
                http_protocol_options: {{ allow_chunked_length: true, accept_http_10: true }}
                route_config:
                  request_headers_to_add: [{{ header: {{ key: {mark}, value: "1" }} }}]
                  virtual_hosts:
                    - name: gateway
                      domains: ["*"]
                      routes: [{{ match: {{ prefix: / }}, route: {{ cluster: gateway }} }}]
                http_filters:
                  - name: envoy.filters.http.router
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
  clusters:
    - name: gateway
      load_assignment:
        cluster_name: gateway
        endpoints:
          - lb_endpoints:
              - endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {target} }} }} }}
"""  # noqa: E501

ARGUMENTS: Final = {
    "nginx": ("-c", "{file}", "-p", "{folder}"),
    "haproxy": ("-db", "-f", "{file}"),
    "caddy": ("run", "--adapter", "caddyfile", "--config", "{file}"),
    "envoy": ("-c", "{file}", "--concurrency", "1", "--disable-hot-restart", "--log-level", "off"),
}
"""The arguments with which each proxy reads a configuration."""
_TEXTS: Final = {"nginx": _NGINX, "haproxy": _HAPROXY, "caddy": _CADDY, "envoy": _ENVOY}
FRONTS: Final = {name: (text, ARGUMENTS[name]) for name, text in _TEXTS.items()}


@dataclass
class Line:
    """Bytes of one connection between a proxy and the gateway."""

    up: bytearray = field(default_factory=bytearray)
    down: bytearray = field(default_factory=bytearray)

    def on_data(self, direction: Direction, data: bytes) -> None:
        (self.up if direction is Direction.UP else self.down).extend(data)

    def on_end(self, direction: Direction) -> None:
        pass

    def on_close(self) -> None:
        pass


@dataclass
class HttpListener:
    """A way to the gateway: its port, and the bytes that a proxy sent. Without a proxy, no bytes are recorded."""

    name: str
    port: int
    lines: list[Line] = field(default_factory=list)
    first: bytes = b""
    """An unambiguous request that is sent before, on the same connection."""

    def watch(self) -> Line:
        line = Line()
        self.lines.append(line)
        return line

    def take(self) -> tuple[bytes, bytes]:
        """Return the bytes up and down since the last call."""
        up, down = (b"".join(bytes(getattr(line, way)) for line in self.lines) for way in ("up", "down"))
        for line in self.lines:
            line.up.clear()
            line.down.clear()
        return up, down


def missing() -> set[str]:
    """Return the proxies that are not installed."""
    return {name for name in FRONTS if not shutil.which(name)}


@asynccontextmanager
async def running(name: str, gateway_port: int, folder: Path) -> AsyncIterator[HttpListener]:
    """Run a proxy in front of the gateway inside this context."""
    text, words = FRONTS[name]
    front = HttpListener(name, _free_port())
    async with ToxicProxy("127.0.0.1", gateway_port, watch=front.watch) as tap:
        file = folder / "config.yaml"  # Envoy reads no other name
        file.write_text(text.format(folder=folder, port=front.port, target=tap.port, mark=MARK))
        process = await asyncio.create_subprocess_exec(
            *(shutil.which(name) or name, *(word.format(file=file, folder=folder) for word in words)),
            env={"HOME": str(folder), "PATH": "/usr/bin:/bin"},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await until(lambda: process.returncode is not None or _listens(front.port), f"{name} to listen")
            assert process.returncode is None, f"{name} ended with exit code {process.returncode}"
            yield front
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
