"""scripts/compile: build the gateway with compiled modules."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lab.common.compiled import COMPILED, NotCompiled, compiled
from lab.common.processes import called_from


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the gateway with compiled modules.")
    parser.add_argument("directory", nargs="?", type=Path, help=f"directory of the package (default: {COMPILED})")
    given = parser.parse_args().directory
    try:
        directory = compiled(COMPILED if given is None else called_from() / given)
    except NotCompiled as error:
        sys.exit(f"{error}\nThe build failed; see above.")
    print(f"{directory} has the compiled gateway: pip install {directory}")


if __name__ == "__main__":
    main()
