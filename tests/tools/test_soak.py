"""The soak in its quick form: a real run loses its learner, its server and its orchestrator once each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_kill_of_each_process_loses_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools/soak.py", "--quick", "--json", "--run-dir", tmp_path / "run"],
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["lost"] == found["duplicated"] == found["violations"] == 0
    assert found["faults"] == 3 and found["killed"] == {"learner": 1, "server": 1, "orchestrator": 1}
    assert found["trained"] == 64 * found["steps"] > 0
    assert found["generated"] == found["trained"] + found["dropped"] + found["failed"]
    assert found["dropped"] == sum(count for reason, count in found["reasons"].items() if reason.startswith("dropped"))
