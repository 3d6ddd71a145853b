"""Writes the dashboards into configs/grafana/."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lab.dashboards.all import DASHBOARDS
from lab.dashboards.grafana import as_json

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
