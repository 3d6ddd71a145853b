"""See scripts/compile."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lab.common.compiled import COMPILED, NotCompiled, compiled
from lab.common.processes import called_from


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the gateway.")
    parser.add_argument("directory", nargs="?", type=Path, help=f"where the package goes (default: {COMPILED})")
    given = parser.parse_args().directory
    try:
        directory = compiled(COMPILED if given is None else called_from() / given)
    except NotCompiled as error:
        sys.exit(f"{error}\nThe gateway is not compiled: see above.")
    print(f"{directory} has the gateway, compiled: pip install {directory}")


if __name__ == "__main__":
    main()
