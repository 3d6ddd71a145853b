"""The options of discovery: where instances come from besides the lists of prefillers, decoders and encoders."""

# No `from __future__ import annotations` here: pydantic reads the annotations at run time.
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator, Field

from proxy.settings.kinds import texts
from proxy.settings.section import Section

_MOST_SOURCES: Final = 64


def _once(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is given twice")
    return names


FilePatterns = Annotated[
    tuple[str, ...], BeforeValidator(texts("paths")), Field(max_length=_MOST_SOURCES), AfterValidator(_once)
]


class Discovery(Section):
    """Sources of instances that may come and go while the gateway runs, besides those that are configured."""

    files: FilePatterns = ()
    """Watched files with instances, in the format of Prometheus' file_sd_configs (JSON or YAML); * and ? in a path
    stand for anything. The label role of a group is prefill, decode or encode, and bootstrap_port is what it says of
    prefillers. A relative path is relative to the directory of the configuration file that has it."""

    @property
    def sources(self) -> tuple[str, ...]:
        """All that are named here, of whatever kind."""
        return self.files

    def may_name(self, role: str) -> bool:
        """Whether instances of a role may come from here."""
        return bool(self.files)
