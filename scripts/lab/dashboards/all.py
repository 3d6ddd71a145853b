"""The dashboards there are."""

from __future__ import annotations

from typing import Final

from lab.dashboards.choosing import CHOOSING
from lab.dashboards.engines import ENGINES
from lab.dashboards.faults import FAULTS
from lab.dashboards.instances import INSTANCES_PAGE
from lab.dashboards.overview import OVERVIEW
from lab.dashboards.stages import STAGES

DASHBOARDS: Final = (OVERVIEW, STAGES, INSTANCES_PAGE, CHOOSING, FAULTS, ENGINES)
