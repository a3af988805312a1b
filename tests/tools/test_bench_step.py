"""tools/bench_step.py --quick: one JSON object, and what it says of buffers and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_step.py"


@pytest.mark.timeout(300)
def test_quick_prints_one_json_object() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(TOOL), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (result,) = json.loads(done.stdout)["results"]
    found = {row["name"]: row for row in result["outcomes"]}
    assert list(found) == ["plain", "accumulate", "deferred", "two_pass", "proxy", "reference"]
    # a gradient in fp32: none, one, none, none, none, two beside the gradient itself
    buffers = [row["persistent"] / (4 * result["parameters"]) for row in found.values()]
    assert buffers == [0, 1, 0, 0, 0, 2]
    assert found["plain"]["ratio_to_plain"] == 1 and found["plain"]["floor"] == 0
    assert found["reference"]["floor"] > 0 and found["two_pass"]["floor"] > found["deferred"]["floor"] > 0
    assert all(row["median"] > 0 and row["transient"] > 0 for row in found.values())
    # the reference's way makes both of its buffers in the step, and everything else for one trajectory only
    assert found["reference"]["transient"] > 8 * result["parameters"]
