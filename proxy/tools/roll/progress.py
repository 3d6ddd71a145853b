"""How far a roll has come, in a file, so that it can be taken up again."""

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
    """How far a roll has come. Each change is written to its file."""

    path: Path | None
    """The file, or None to write none."""
    role: str
    began: str
    """When, for people."""
    done: list[str] = field(default_factory=list)
    """Instances that were restarted, in turn."""
    current: str | None = None
    """The one that was taken out of service and is not back yet."""

    @classmethod
    def taken_up(cls, path: Path, role: str, began: str) -> Self:
        """What the file says, or a new one that began now. Raises SettingsError where it says something else."""
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
        """Whether there is anything to take up."""
        return bool(self.done) or self.current is not None

    def taking(self, address: str | None) -> None:
        """This one is taken out of service; None: the one that was is back as it was."""
        self.current = address
        self._write()

    def restarted(self) -> None:
        """The one that was taken out of service is back, as another process."""
        if self.current is not None:
            self.done.append(self.current)
        self.taking(None)

    def forget(self) -> None:
        """The roll is complete. Raises SettingsError."""
        if self.path is not None:
            with self._writing():
                self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        """Whole or not at all."""
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
