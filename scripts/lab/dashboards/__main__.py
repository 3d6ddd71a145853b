"""Writes the dashboards into configs/grafana/."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Final

from lab.dashboards.choosing import CHOOSING
from lab.dashboards.clients import CLIENTS
from lab.dashboards.configuration import CONFIGURATION
from lab.dashboards.engines import ENGINES
from lab.dashboards.faults import FAULTS
from lab.dashboards.grafana import as_json
from lab.dashboards.instances import INSTANCES_PAGE
from lab.dashboards.overview import OVERVIEW
from lab.dashboards.stages import STAGES

DASHBOARDS: Final = (OVERVIEW, STAGES, INSTANCES_PAGE, CHOOSING, CLIENTS, FAULTS, CONFIGURATION, ENGINES)


DIRECTORY = Path("configs/grafana")


def main() -> None:
    """Write them all; a file that no dashboard has any more is removed."""
    argparse.ArgumentParser(prog="scripts/dashboards", description=__doc__).parse_args()
    written = {DIRECTORY / f"{dashboard.name}.json": dashboard for dashboard in DASHBOARDS}
    for stale in set(DIRECTORY.glob("*.json")) - written.keys():
        stale.unlink()
    for path, dashboard in written.items():
        path.write_text(json.dumps(as_json(dashboard), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
