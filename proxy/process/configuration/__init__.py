"""The configuration of all workers, which is replaced as a whole or not at all.

Any process may reload it: it reads and checks everything and publishes the result, with the configured instances, in
shared memory. Every worker notices within a quarter of a second and applies it. A refused reload changes nothing. The
file of client keys is watched and reloaded when it changes.
"""

from proxy.process.configuration.configuration import FIXED, ConfigSnapshot, Configuration, secrets_of, shown, text_of
from proxy.process.configuration.watcher import ConfigWatcher
from proxy.settings.change import ConfigChange

__all__ = [
    "FIXED",
    "ConfigChange",
    "ConfigSnapshot",
    "ConfigWatcher",
    "Configuration",
    "secrets_of",
    "shown",
    "text_of",
]
