"""The owner of a connection, with real sockets of this user, another user and another container."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from proxy.api.socket_owner import find_owner_objection

CONNECT = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print(flush=True)
connection.recv(1)
"""
PYTHON = shutil.which("python3", path="/usr/bin") or "/usr/bin/python3"
_needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a program as another user")


def listener(family: socket.AddressFamily = socket.AF_INET, host: str = "127.0.0.1") -> socket.socket:
    made = socket.socket(family)
    if family is socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    made.bind((host, 0))
    made.listen()
    return made


def found_by(server: socket.socket) -> str | None:
    """Return the objection to the next connection that the server accepts."""
    accepted, peer = server.accept()
    with accepted:
        return find_owner_objection(peer, accepted.getsockname())


@contextmanager
def connected(server: socket.socket, *under: str, user: int | None = None) -> Iterator[None]:
    """Have a process connect, which another command may start, or another user; it stays until the block ends."""
    words = [*under, PYTHON, "-I", "-c", CONNECT, str(server.getsockname()[1])]
    try:
        process = subprocess.Popen(words, user=user, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/")
    except OSError as error:
        pytest.skip(f"{words[0]} cannot be started here: {error}")
    with process:
        assert process.stdout is not None
        if process.stdout.readline() == b"":
            pytest.skip(f"{words[0]} cannot be started here")
        yield
        process.kill()


@pytest.mark.parametrize(
    ("listens", "connects"),
    [
        ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "127.0.0.1")),
        ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")),
        ((socket.AF_INET, "127.0.0.9"), (socket.AF_INET, "127.0.0.9")),
        ((socket.AF_INET6, "::1"), (socket.AF_INET6, "::1")),
        ((socket.AF_INET6, "::"), (socket.AF_INET, "127.0.0.1")),
        ((socket.AF_INET6, "::"), (socket.AF_INET6, "::ffff:127.0.0.1")),
        ((socket.AF_INET6, "::ffff:127.0.0.1"), (socket.AF_INET, "127.0.0.1")),
    ],
)
def test_own_connection_is_recognised_in_both_tables(
    listens: tuple[socket.AddressFamily, str], connects: tuple[socket.AddressFamily, str]
) -> None:
    with listener(*listens) as server, socket.socket(connects[0]) as client:
        client.connect((connects[1], server.getsockname()[1]))
        assert found_by(server) is None


def test_own_connection_is_found_among_many() -> None:
    with listener() as server, ExitStack() as stack:
        server.listen(400)
        for _ in range(300):
            stack.enter_context(socket.create_connection(server.getsockname()))
        for _ in range(299):
            stack.enter_context(server.accept()[0])
        assert found_by(server) is None


def test_another_process_of_the_same_user_is_recognised() -> None:
    with listener() as server, connected(server):
        assert found_by(server) is None


@_needs_root
@pytest.mark.fault(141)
def test_connection_of_another_user_is_not_local() -> None:
    with listener() as server, connected(server, user=65533):
        assert found_by(server) == (
            "a program of another user (uid 65533) opened the connection, as a reverse proxy does"
        )


@_needs_root
@pytest.mark.fault(141)
def test_same_user_of_another_container_is_not_local() -> None:
    with listener() as server, connected(server, "unshare", "--pid", "--fork", "--kill-child"):
        assert found_by(server) == "a program of another container opened the connection, as a reverse proxy does"


@pytest.mark.fault(141)
@pytest.mark.parametrize("is_reset", [True, False])
def test_connection_that_its_program_has_closed_has_no_owner(is_reset: bool) -> None:
    with listener() as server:
        client = socket.create_connection(server.getsockname())
        accepted, peer = server.accept()
        with accepted:
            if is_reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()  # the kernel shows what is left of it as root's
            assert (
                find_owner_objection(peer, accepted.getsockname())
                == "the system does not report which user opened the connection"
            )


def test_invalid_addresses_are_not_local() -> None:
    assert find_owner_objection(("", 0), ("", 0)) == "the system does not report which user opened the connection"
