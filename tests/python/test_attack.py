"""The worst bodies that are known, against a server with 2 GiB, beside real-time clients; and a
short piece of the soak. scripts/attack.py and scripts/soak_security.py run longer.

They load all cores for a minute and judge what clients see meanwhile, so they run only with
ATOLL_ATTACK=1, on a machine of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import BINARY, SCRIPTS

pytestmark = pytest.mark.skipif(
    "ATOLL_ATTACK" not in os.environ, reason="ATOLL_ATTACK=1 attacks a server"
)

# Tests run on machines that other work shares, and attackers share its cores: twice is for
# --seconds 600 on a machine of its own. What this catches is real time that waits for an attack.
MAX_SLOWDOWN = 20


def test_attackers_take_neither_the_server_nor_real_time(tmp_path: Path) -> None:
    report = tmp_path / "attack.json"
    command = [sys.executable, str(SCRIPTS / "attack.py"), "--binary", str(BINARY)]
    command += ["--seconds", "20", "--alone-seconds", "5", "--json", str(report)]
    command += ["--max-slowdown", str(MAX_SLOWDOWN)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(report.read_text())
    assert found["alive"] and found["peak_rss_mib"] < found["limit_mib"]
    sent = sum(sum(results.values()) for results in found["attacks"].values())
    assert sent > 100 and len(found["attacks"]) > 15, found["attacks"]
    assert found["real_time"]["attacked"]["requests"] > 100


def test_a_piece_of_the_soak_loses_nothing(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    command = [sys.executable, str(SCRIPTS / "soak_security.py"), "--binary", str(BINARY)]
    command += ["--seconds", "20", "--restart-seconds", "6", "--append", str(file)]
    for pieces in (1, 2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        whole = json.loads(file.read_text())
        assert len(whole["pieces"]) == pieces
    total = whole["total"]
    assert total["lost"] == 0 and total["problems"] == 0
    for what in ("registrations", "verified", "kills", "orderly restarts", "REST replies"):
        assert total["counts"][what] > 0, total
