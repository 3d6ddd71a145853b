"""What has been told in the log, by whichever worker: all of them find out the same, and it is said once.

Make it before forking.
"""

from __future__ import annotations

from typing import Final

from proxy.balancer.shared.memory import SharedValue

_CAPACITY_BYTES: Final = 1024 * 1024  # 1,024 instances with the longest names take 300 KiB


class Bulletin:
    """The last word on each subject, such as an instance and its state of health."""

    def __init__(self, capacity_bytes: int = _CAPACITY_BYTES) -> None:
        """`capacity_bytes`: of all subjects and words as JSON. When they do not fit, only the newest is kept."""
        self._shared = SharedValue("bulletin", capacity_bytes)
        self._shared.write({})
        self._read_version = -1
        self._words: dict[str, str] = {}

    def is_news(self, subject: str, word: str) -> bool:
        """Whether that is not what was told of the subject last. From now on it is."""
        if self._read().get(subject) == word:
            return False
        with self._shared.exclusive():
            words = self._read()
            if words.get(subject) == word:
                return False
            self._write({**words, subject: word}, or_only={subject: word})
            return True

    def forget(self, subject: str) -> None:
        """Drop what was told of a subject that no longer exists; if it returns, its first word is news again."""
        with self._shared.exclusive():
            words = self._read()
            self._write({known: word for known, word in words.items() if known != subject}, or_only={})

    def _read(self) -> dict[str, str]:
        if self._shared.version != self._read_version:
            self._read_version, self._words = self._shared.read()
        return self._words

    def _write(self, words: dict[str, str], or_only: dict[str, str]) -> None:
        try:
            self._shared.write(words)
        except ValueError:  # full of what is gone and was not forgotten: some things are told twice
            self._shared.write(or_only)
