"""The current settings, which a reload replaces while parts use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.settings.model import Settings


class LiveSettings:
    """The current settings, and the functions to call after a reload.

    Parts read `settings` when they need an option. A part that must act after a change passes a function to
    `call_on_change`.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._change_listeners: list[Callable[[Settings], None]] = []

    def call_on_change(self, function: Callable[[Settings], None]) -> None:
        """Call a function with the new settings after each reload. The function must neither wait nor fail."""
        self._change_listeners.append(function)

    def replace_settings(self, settings: Settings) -> None:
        """Replace the settings at once, so that no request sees a mixture."""
        self.settings = settings
        for function in self._change_listeners:
            function(settings)
