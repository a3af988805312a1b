"""tools/bench_step.py --quick: one JSON object, and what it says of buffers and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.roofline import MachineRates
from benchmarks.step import StepComparison, StepCost, Workload, curves

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_step.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_quick_prints_one_json_object() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(TOOL), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "SyncActivityProfilerHandler" not in done.stderr  # torch's, which counts the bytes, is not to talk
    printed = json.loads(done.stdout)
    assert printed["benchmark"] == "step"
    (result,) = printed["results"]
    found = {row["name"]: row for row in result["outcomes"]}
    assert list(found) == ["plain", "accumulate", "deferred", "two_pass", "proxy", "reference"]
    # a gradient in fp32: none, one, none, none, none, two beside the gradient itself
    buffers = [row["persistent"] / (4 * result["parameters"]) for row in found.values()]
    assert buffers == [0, 1, 0, 0, 0, 2]
    assert found["plain"]["ratio_to_plain"] == 1 and found["plain"]["roofline"] == 0
    assert found["reference"]["roofline"] > 0 and found["two_pass"]["roofline"] > found["deferred"]["roofline"] > 0
    assert all(row["median"] > 0 and row["transient"] > 0 for row in found.values())
    # the reference's way makes both of its buffers in the step, and everything else for one trajectory only
    assert found["reference"]["transient"] > 8 * result["parameters"]


def test_curves_over_lengths() -> None:
    """Medians of ratios inside a round, MiB of the peak; a model measured at one length has no curve."""

    def measured(model: str, median: int, seconds: tuple[float, ...], peak: int) -> StepComparison:
        rates = MachineRates(1.0, 1.0, 1.0)
        outcomes = (StepCost("plain", (1.0, 2.0, 4.0), 2**20, 0), StepCost("deferred", seconds, peak, 0))
        return StepComparison(Workload(model, median, 1, 2), 10, (median, median), outcomes, rates)

    rows = [
        measured("10M", 64, (1.5, 2.2, 4.4), 3 * 2**20),
        measured("60M", 64, (1.0, 2.0, 4.0), 0),
        measured("10M", 128, (1.0, 2.5, 4.2), 5 * 2**19),
    ]
    assert curves(rows) == (
        "10M: time over plain, by median answer length\n"
        "                    64       128\n"
        "plain            1.000     1.000\n"
        "deferred         1.100     1.050\n"
        "10M: peak MiB of a step, by median answer length\n"
        "                    64       128\n"
        "plain              1.0       1.0\n"
        "deferred           3.0       2.5\n"
    )
