"""Plans without sharing beside the optimum that HiGHS finds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support import BINARY, SCRIPTS

INSTANCES = BINARY.parent / "examples" / "planner_instances"
COUNT = 80
FIRST_SEED = 700_001


def test_plans_are_as_good_as_those_of_an_exact_solver(tmp_path: Path) -> None:
    instances = tmp_path / "instances"
    with instances.open("w") as output:
        # Without a table of profiles each instance draws its own.
        command = [str(INSTANCES), str(COUNT), "", str(FIRST_SEED)]
        subprocess.run(command, stdout=output, check=True)
    oracle = [sys.executable, str(SCRIPTS / "planner_oracle.py"), str(instances)]
    result = subprocess.run(oracle, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    # A solver that finishes nothing compares nothing.
    compared = int(result.stdout.partition(" compared")[0].split()[-1])
    assert compared > COUNT / 2, result.stdout
