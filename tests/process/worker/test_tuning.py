"""Settings of the interpreter and the operating system in a serving process."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
from proxy.common.terms import Stage
from proxy.process.worker.tuning import tune_process
before = [Stage[name] for name in Stage.__members__]
tune_process()
tune_process()
assert [getattr(Stage, name) for name in Stage.__members__] == before == list(Stage)
assert Stage("E") is Stage.ENCODE
try:
    Stage.NOTHING
except AttributeError:
    print("none")
"""


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="it does nothing to enums there")
def test_members_of_enums_are_found_as_before_and_no_others() -> None:
    done = subprocess.run((sys.executable, "-c", PROGRAM), capture_output=True, text=True, check=True)
    assert done.stdout == "none\n"
