"""A store for the replicas: fakeredis' server, which speaks the protocol over a real socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from fakeredis import TcpFakeServer

from proxy.settings import Settings


@contextmanager
def serving(port: int = 0) -> Iterator[int]:
    """Run an empty store inside the block, and yield its port. `port` 0: any free one."""
    server = TcpFakeServer(("127.0.0.1", port), server_type="valkey")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def store_port() -> Iterator[int]:
    with serving() as port:
        yield port


def settings_with(replicas: Mapping[str, object], **sections: object) -> Settings:
    """Return settings of a gateway with these options of `replicas`, and more sections."""
    return Settings.model_validate({"decode": ["10.0.0.1:1"], "connector": "plain", "replicas": replicas, **sections})
