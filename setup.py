"""Adds the compiled modules to the wheel if PDPROXY_COMPILE is set. pyproject.toml has everything else."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
from lab.common.compiled.backend import setup_options

setup(**setup_options())
