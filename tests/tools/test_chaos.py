"""Each fault once, on two embedded servers of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_run_survives_each_fault_of_a_server(tmp_path: Path) -> None:
    tool = ROOT / "tools" / "chaos.py"
    command = [sys.executable, str(tool), "--quick", "--json", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["faults"] == {"killed": 1, "stopped": 1, "refused": 1} and outcome["clean"]
    assert outcome["lost"] == outcome["duplicated"] == outcome["violations"] == outcome["failed"] == 0
    assert outcome["trained"] + outcome["dropped"] == outcome["generated"] and outcome["trained"] > 0
    assert outcome["deaths"] == 2 and outcome["refusals"] == 1 and outcome["mismatch"] < 1e-3
    assert len(outcome["recovery_s"]) == 3
