"""The formula of docs/weight_sync.md against updates that were measured, with the rates of the same run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_formula_says_how_long_a_small_update_takes() -> None:
    """It knows nothing of the protocol's other requests, nor of waiting for a core: it is below what is measured."""
    command = [sys.executable, str(ROOT / "tools" / "bench_sync.py"), "--quick", "--no-pauses", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    timings = {row["transport"]: row for row in result["transports"]}
    assert timings.keys() == {"tensor", "disk", "distributed"} and result["bytes"] > 5e6
    assert timings["tensor"]["formula_s"] is None and timings["disk"]["formula_s"] is None
    assert 0.15 < timings["distributed"]["formula_s"] / timings["distributed"]["update_s"] < 1.5
    assert all(row["update_s"] > 0 and row["stall_s"] > 0 for row in timings.values())
