"""Counts the blocks in an engine's KV events by kind and medium."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import zmq

from tests.real.programs import HOST

_POLL_MS = 100


@contextmanager
def count_media(port: int) -> Iterator[Counter[tuple[str, str]]]:
    """Subscribe to the engine that publishes at this port. Yields the numbers of blocks, which grow meanwhile."""
    counts: Counter[tuple[str, str]] = Counter()
    ended = threading.Event()
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(f"tcp://{HOST}:{port}")

        def listen() -> None:
            while not ended.is_set():
                if socket.poll(_POLL_MS):
                    _, _, payload = socket.recv_multipart()
                    for event in msgspec.msgpack.decode(payload)[1]:
                        counts[event["type"], str(event.get("medium"))] += len(event.get("block_hashes", ()))

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield counts
        finally:
            ended.set()
            thread.join()
