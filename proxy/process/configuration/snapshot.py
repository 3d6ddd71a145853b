"""A configuration as a value, and its JSON in shared memory, which has secrets in clear."""

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
"""Time of the last change, inode and size of a file. They differ after the file was written or replaced."""


@dataclass(frozen=True, slots=True)
class ConfigSnapshot:
    """One configuration."""

    settings: Settings
    read_at: float
    """Time of reading, in seconds since the epoch."""
    client_keys: tuple[ClientKey, ...] = ()
    slots: Mapping[str, int] = field(default_factory=dict)
    """Slots of the client keys' usage, by name."""
    keys_stamp: Stamp | None = None
    """Stamp of the file of client keys at the last reading; None if there is no such file."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Origin of each option: a flag, a variable, a file, or `default`."""


def to_json(current: ConfigSnapshot) -> dict[str, Any]:
    """Return the JSON that `from_json` reads."""
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
    """Return every option with its value and origin, with masked keys."""
    tree: Mapping[str, Any] = current.settings.model_dump(mode="json")
    return {
        "read_at": current.read_at,
        "options": [
            {"name": name, "value": reduce(getitem, name.split("."), tree), "origin": current.origins.get(name)}
            for name in OPTIONS
        ],
    }


def secrets_of(settings: Settings) -> list[str]:
    """Return all secrets, in clear."""
    return [text for option in SECRETS if (text := text_of(option_of(settings, option)))]


def text_of(secret: SecretStr | None) -> str | None:
    """Return the text of a secret, in clear."""
    return None if secret is None else secret.get_secret_value()


def option_of(settings: Settings, name: str) -> Any:
    """Return the value of a dotted option."""
    return reduce(getattr, name.split("."), settings)
