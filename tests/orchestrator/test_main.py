"""``python -m vcpo_megatron.orchestrator`` as a process: signals, exit codes, last lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.messages import assert_names
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
    (line,) = err.splitlines()
    assert_names(line, "vcpo: error: VCPO_RESUME_STEP is not set", "`vcpo train`")
    cfg = config(model={"path": tmp_path / "nothing"})
    run = FakeRun(tmp_path / "run", cfg)
    run.context.directory.resolved.write_text(dump_resolved(cfg))
    process = start_process(run.context.environment())
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "Traceback" not in err and err.splitlines()[-1].startswith("vcpo: error: model.path = ")


LEFT_BEHIND = """
import asyncio, time
import vcpo_megatron.orchestrator.__main__ as orchestrator
import vcpo_megatron.run.tasks as tasks

async def swallow():
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass

async def run(context):
    global left
    left = asyncio.ensure_future(swallow())
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 1000)
    await asyncio.sleep(0.05)
    return "run ended"

tasks._CANCEL_S, orchestrator.run = 0.2, run
orchestrator._end(orchestrator.main())
"""


def test_the_process_ends_when_the_run_has_whatever_tasks_and_threads_are_left(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, config())
    done = subprocess.run(
        [sys.executable, "-c", LEFT_BEHIND],
        env={**os.environ, **run.context.environment()},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1], done.stderr) == (0, "run ended", "")


def test_an_environment_that_cannot_be_made_is_the_last_line_of_the_log(tmp_path: Path, model_folder: Path) -> None:
    faulty = {"name": "tests.environments.workers.faulty:Faulty", "options": {"factory": "quit"}, "workers": 1}
    cfg = config(model={"path": model_folder}, environment=faulty)
    run = FakeRun(tmp_path / "run", cfg)
    run.context.directory.resolved.write_text(dump_resolved(cfg))
    process = start_process(run.context.environment())
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "Traceback" not in err
    line = err.splitlines()[-1]
    log = run.context.directory.log("environment", 0)
    assert line.startswith("vcpo: error: environment.name = 'tests.environments.workers.faulty:Faulty': environment w")
    assert_names(line, "exit code 5 in the factory", f"see {log}")
