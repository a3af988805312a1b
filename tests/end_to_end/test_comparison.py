"""``vcpo compare`` with real runs: killed, stopped and taken up again, it gets what it gets undisturbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.comparison.specs import written_spec
from tests.end_to_end.running import ROOT, Run
from vcpo_megatron.comparison.results import RunRecord, read_records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

#: Two runs of a few steps with a checkpoint after each.
CHANGES = (
    ("steps = 40", "steps = 8"),
    ("eval_every = 10", "eval_every = 4"),
    ("lags = [16]", "lags = [2]"),
    ("seeds = [0, 1]", "seeds = [0]"),
    (
        'optimizer.schedule = "constant"',
        'optimizer.schedule = "constant"\nparallel.tensor = 1\nlaunch.learner_ranks = 1\ncheckpoint.every = 1\n'
        "checkpoint.keep_last = 1\nobservability.tensorboard = false",
    ),
)


class Comparing(Run):
    """One ``vcpo compare``, watched as a run is."""

    def __init__(self, spec: Path, out: Path) -> None:
        self.run_dir = out
        self.output = out.with_name(out.name + ".out")
        with open(self.output, "a") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vcpo_megatron", "compare", str(spec), "--out", str(out), "--jobs", "1"],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._seen = {}

    def checkpoints(self) -> int:
        """Steps of the newest complete one of any run."""
        found = (self.run_dir / "runs").glob("*/checkpoints/step_*/manifest.json")
        return max((int(path.parent.name.removeprefix("step_")) for path in found), default=0)

    def gone(self) -> bool:
        """Whether nothing is left; what a killed process leaves dies within seconds."""
        deadline = time.monotonic() + 60
        while self.left_over() and time.monotonic() < deadline:
            time.sleep(0.1)
        return not self.left_over()


def numbers(records: list[RunRecord]) -> list[tuple[object, ...]]:
    """What is the same to the last bit in every course of a run: not its times."""
    done = [record for record in records if record.status == "done"]
    return [
        (
            *(record.label, record.evaluated, record.accuracy, record.step),
            {name: values for name, values in record.series.items() if not name.startswith("time/")},
        )
        for record in done
    ]


def test_a_comparison_that_is_killed_and_stopped_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    spec, out = written_spec(tmp_path, *CHANGES), tmp_path / "disturbed"
    with Comparing(spec, out) as killed:
        killed.wait_for(lambda: killed.checkpoints() >= 1, 400, "checkpoint")
        killed.members()
        os.kill(killed.process.pid, signal.SIGKILL)
        killed.process.wait(60)
        assert killed.gone(), killed.left_over()
    assert read_records([out]) == []

    with Comparing(spec, out) as stopped:
        at = stopped.checkpoints()
        stopped.wait_for(lambda: stopped.checkpoints() > at, 400, "checkpoint")
        stopped.signal(signal.SIGINT)
        assert stopped.wait(300) == 130, stopped.text()
        assert stopped.gone(), stopped.left_over()
    assert [record.status for record in read_records([out])] == ["stopped"]

    with Comparing(spec, out) as last:
        assert last.wait(600) == 0, last.text()
        assert last.gone(), last.left_over()
    assert "goes on from step" in last.text()
    with Comparing(spec, tmp_path / "undisturbed") as reference:
        assert reference.wait(600) == 0, reference.text()
    found, expected = read_records([out]), read_records([tmp_path / "undisturbed"])
    assert numbers(found) == numbers(expected) and len(numbers(found)) == 2
    assert all(seconds is not None for record in expected for seconds in record.process_seconds)
