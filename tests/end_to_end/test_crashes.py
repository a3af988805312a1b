"""Ten crashes of one real run in exact lag, and a stop within a step: the weights at the end are those of no crash."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from .running import Run, read_rows

SETTINGS = (
    "staleness.lag=exact",
    "staleness.max_staleness=2",
    "train.steps=40",
    "train.eval_every=0",
    "train.groups_per_step=4",
    "checkpoint.every=2",
    "launch.learner_ranks=1",
    "parallel.tensor=1",
    "rollout.sync=disk",
)  # servers are updated while the learner is held still
CRASHES = 10


def tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state of a checkpoint, by torch's own reader."""
    loaded = _load_state_dict_from_keys(storage_reader=FileSystemReader(run_dir / "checkpoints" / f"step_{step}"))
    found: dict[str, torch.Tensor] = {}

    def collect(prefix: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            found[prefix] = value
        elif isinstance(value, dict):
            for name, part in value.items():
                collect(f"{prefix}/{name}", part)

    collect("", loaded)
    return found


def after_steps(run: Run, metrics: Path, count: int) -> None:
    """Wait for ``count`` rows of this attempt, which begins by cutting the file back."""
    least, seen = 10**9, 0

    def look() -> bool:
        nonlocal least, seen
        seen = len(run.rows()) if metrics.exists() else 0
        least = min(least, seen)
        return seen >= least + count

    run.wait_for(look, 300, f"{count} further steps")


def stop_within_a_step(run_dir: Path) -> None:
    """Stop the run until a stop has come in the middle of a step, six times at most.

    Steps are short: the learner is held still at the beginning of one until it has been asked to leave it.
    """
    for _ in range(6):
        with Run(run_dir, "launch.grace_s=1", resume=True) as run:
            after_steps(run, run_dir / "metrics.jsonl", 1)
            learner = run.members()["learner 0"]
            learner.suspend()
            time.sleep(1.0)  # its next batch is sent
            run.signal(signal.SIGTERM)
            time.sleep(1.5)
            learner.resume()
            assert run.wait(60) == 128 + signal.SIGTERM, run.text()
        if "was aborted (launch.grace_s" in (run_dir / "logs/orchestrator.0.log").read_text():
            return
    pytest.fail("no stop came in the middle of a step")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_ten_crashes_give_the_weights_of_none(tmp_path: Path) -> None:
    with Run(tmp_path / "whole", *SETTINGS) as run:
        assert run.wait(300) == 0, run.text()
    rng = random.Random(0)
    for crash in range(CRASHES):
        settings = () if crash else SETTINGS
        with Run(tmp_path / "crashed", *settings, resume=crash > 0) as run:
            after_steps(run, run.run_dir / "metrics.jsonl", 1 + crash % 2)
            time.sleep(rng.uniform(0, 0.2))
            run.members()[("learner 0", "orchestrator 0")[crash % 2]].kill()
            assert run.wait(60) == 1
    stop_within_a_step(tmp_path / "crashed")
    with Run(tmp_path / "crashed", resume=True) as run:
        assert run.wait(300) == 0, run.text()
    rows = [read_rows(tmp_path / name) for name in ("whole", "crashed")]
    assert [row["step"] for row in rows[1]] == list(range(40))
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]
    assert rows[1][-1]["rollouts/trained"] == 40 * 4 * 8
    whole, crashed = tensors(tmp_path / "whole", 40), tensors(tmp_path / "crashed", 40)
    assert whole.keys() == crashed.keys() and len(whole) > 20
    for name, tensor in whole.items():
        assert torch.equal(tensor, crashed[name]), name
