"""Progress of a roll in a file, so that it can be resumed."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Self

import orjson

from proxy.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(slots=True)
class RollProgress:
    """Progress of a roll. Each change is written to its file."""

    path: Path | None
    """Path of the file; None: there is no file."""
    role: str
    began: str
    """Time of the start, as text."""
    done: list[str] = field(default_factory=list)
    """Restarted instances, in order."""
    current: str | None = None
    """The instance that is out of service; None if there is none."""

    @classmethod
    def taken_up(cls, path: Path, role: str, began: str) -> Self:
        """Return the progress in the file, or a new one without a file.

        Raises SettingsError for another roll's file.
        """
        try:
            told = orjson.loads(path.read_bytes())
            if told["role"] != role:
                raise SettingsError(f"{path} is of a roll of {told['role']} instances; say another --state")
            return cls(path, role, str(told["began"]), list(told["done"]), told["current"])
        except FileNotFoundError:
            return cls(path, role, began)
        except OSError as error:
            raise SettingsError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
        except (ValueError, LookupError, TypeError):
            raise SettingsError(f"{path} does not say how far a roll has come; say another --state") from None

    @property
    def is_begun(self) -> bool:
        """Return whether there is progress to resume."""
        return bool(self.done) or self.current is not None

    def taking(self, address: str | None) -> None:
        """Note that this instance is taken out of service; None: the last one is back unchanged."""
        self.current = address
        self._write()

    def restarted(self) -> None:
        """Note that the instance is back as a new process."""
        if self.current is not None:
            self.done.append(self.current)
        self.taking(None)

    def forget(self) -> None:
        """Remove the file, because the roll is complete. Raises SettingsError."""
        if self.path is not None:
            with self._writing():
                self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        """Write the file atomically."""
        if self.path is not None:
            new = self.path.with_name(f"{self.path.name}.new")
            told = {name: value for name, value in asdict(self).items() if name != "path"}
            with self._writing():
                new.write_bytes(orjson.dumps(told, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
                os.replace(new, self.path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise SettingsError(f"--state {self.path} cannot be written: {reason}") from None
