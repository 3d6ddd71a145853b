"""The base of all sections of the settings."""

# No `from __future__ import annotations` here: pydantic reads the annotations at run time.
from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen section without unknown options, whose fields are documented."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )
