"""The configuration in force: one for all workers, replaced as a whole or not at all.

Whichever process is told to reads everything again, checks it, and publishes it in shared memory, the configured
instances with it. Every worker notices at its next look, a quarter of a second later at most, and applies it to its
parts. What is refused, with one sentence, changes nothing. The file of client keys is looked at all the time, and read
again when it is another.
"""

from proxy.process.configuration.configuration import FIXED, Configuration
from proxy.process.configuration.snapshot import ConfigSnapshot, secrets_of, shown, text_of
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
