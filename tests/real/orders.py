"""Orders that tests give to running decoders: end a request as `recomputed`.

An order is a file in a directory that all decoders look at. The decoder that deletes the file carries out the order.
"""

from __future__ import annotations

from pathlib import Path


class Orders:
    """The orders that no decoder has carried out yet, oldest first."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)

    def give(self, *after_tokens: int) -> None:
        """Give one order per number: end the newest running request when it has this number of output tokens.

        Raises AssertionError if orders are left.
        """
        assert not self.left()
        for number, tokens in enumerate(after_tokens):
            (self._directory / f"{number:03}-{tokens}").touch()

    def left(self) -> list[str]:
        return sorted(path.name for path in self._directory.iterdir())

    def withdraw(self) -> None:
        for name in self.left():
            (self._directory / name).unlink(missing_ok=True)

    def take(self, tokens: int) -> bool:
        """Return whether a request with this number of output tokens must end now.

        The order is then deleted, and the caller ends the request.
        """
        for name in self.left()[:1]:
            if tokens >= int(name.partition("-")[2]):
                try:
                    (self._directory / name).unlink()
                except FileNotFoundError:
                    return False
                return True
        return False
