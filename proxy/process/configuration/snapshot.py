"""What is in force, as a value, and how it lies in shared memory: as JSON, secrets in clear."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from typing import TYPE_CHECKING, Any

from proxy.settings import OPTIONS, SECRETS, ClientKey, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import SecretStr

Stamp = tuple[int, int, int]
"""Of a file: when it was changed, its inode and its size. One that was written or exchanged has another."""


@dataclass(frozen=True, slots=True)
class ConfigSnapshot:
    """What is in force."""

    settings: Settings
    read_at: float
    """When it was read, in seconds since the epoch."""
    client_keys: tuple[ClientKey, ...] = ()
    slots: Mapping[str, int] = field(default_factory=dict)
    """Where the use of each client key is counted, by its name."""
    keys_stamp: Stamp | None = None
    """Of the file of client keys, as it was looked at last; None when there is no such file."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where the value of each option comes from: a flag, a variable, a file or `default`."""


def to_json(current: ConfigSnapshot) -> dict[str, Any]:
    """For `from_json`."""
    settings = current.settings.model_dump(mode="json")
    for option in SECRETS:
        section, _, name = option.partition(".")
        settings[section][name] = text_of(option_of(current.settings, option))
    return {
        "settings": settings,
        "read_at": current.read_at,
        "client_keys": [key.model_dump(mode="json") for key in current.client_keys],
        "slots": dict(current.slots),
        "keys_stamp": current.keys_stamp,
        "origins": dict(current.origins),
    }


def from_json(value: dict[str, Any]) -> ConfigSnapshot:
    stamp = value["keys_stamp"]
    return ConfigSnapshot(
        Settings.model_validate(value["settings"]),
        value["read_at"],
        tuple(ClientKey.model_validate(key) for key in value["client_keys"]),
        value["slots"],
        stamp and tuple(stamp),
        value["origins"],
    )


def shown(current: ConfigSnapshot) -> dict[str, Any]:
    """For operators: every option with its value, in which keys are masked, and where that comes from."""
    tree: Mapping[str, Any] = current.settings.model_dump(mode="json")
    return {
        "read_at": current.read_at,
        "options": [
            {"name": name, "value": reduce(getitem, name.split("."), tree), "origin": current.origins.get(name)}
            for name in OPTIONS
        ],
    }


def secrets_of(settings: Settings) -> list[str]:
    """What must not be shown to anybody, in clear."""
    return [text for option in SECRETS if (text := text_of(option_of(settings, option)))]


def text_of(secret: SecretStr | None) -> str | None:
    """In clear."""
    return None if secret is None else secret.get_secret_value()


def option_of(settings: Settings, name: str) -> Any:
    """The value of a dotted option."""
    return reduce(getattr, name.split("."), settings)
