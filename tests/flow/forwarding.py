"""What stands for the client's connection where tokens bypass the delivery."""

from __future__ import annotations


class Client:
    """Takes all that is written: a transport, its protocol, and the ClientStream that has both."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_paused = False
        self.has_left = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.has_left


def framed(data: bytes) -> bytes:
    """One chunk of HTTP/1.1."""
    return b"%x\r\n%b\r\n" % (len(data), data)
