"""``python -m vcpo_megatron.orchestrator`` as a process: signals, exit codes, last lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.orchestrator.fake_run import FakeRun, config
from vcpo_megatron.config.load import dump_resolved

pytestmark = pytest.mark.timeout(90)


def start_process(environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "vcpo_megatron.orchestrator"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_process_stops_by_a_signal_after_a_checkpoint(tmp_path: Path, model_folder: Path) -> None:
    FakeRun(tmp_path / "source", config(train={"steps": 40})).run()
    cfg = config(
        model={"path": model_folder},
        environment={"name": "modular_sum"},
        train={"steps": 40},
        rollout={"engine": "replay", "replay": tmp_path / "source"},
        launch={"timeout_s": 30.0},
    )
    run = FakeRun(tmp_path / "run", cfg)
    run.context.directory.resolved.write_text(dump_resolved(cfg))
    run.learner.step_s = 0.1
    process = start_process(run.context.environment())
    run.learner.start()
    try:
        deadline = time.monotonic() + 30
        while len(run.learner.batches) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    run.learner.join(5)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "stopped by signal" == run.learner.stopped
    done = len(run.learner.batches)
    assert run.learner.checkpoints == [done] and 3 <= done < 40
    assert [row["step"] for row in run.rows()] == list(range(done))


def test_the_process_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    process = start_process({"VCPO_RUN_DIR": ""} | dict.fromkeys(("VCPO_ATTEMPT",), "1"))
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert err.splitlines() == ["vcpo: error: VCPO_RESUME_STEP is not set: this process is started by `vcpo train`"]
    cfg = config(model={"path": tmp_path / "nothing"})
    run = FakeRun(tmp_path / "run", cfg)
    run.context.directory.resolved.write_text(dump_resolved(cfg))
    process = start_process(run.context.environment())
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "Traceback" not in err and err.splitlines()[-1].startswith("vcpo: error: model.path = ")
