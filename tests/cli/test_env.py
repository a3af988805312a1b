"""``vcpo env check``, and what ``train``, ``--dry-run`` and ``doctor`` find of an environment, in a worker process."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from tests.cli.commands import ROOT, errors
from tests.messages import assert_names, assert_said
from vcpo_megatron.cli import main as cli
from vcpo_megatron.environments.workers.pool import WorkerPool
from vcpo_megatron.orchestrator.modes import environment_check

#: A data set whose rewards are the user's, beside run.toml.
REWARDS = """
def score(response, answer):
    return {"reward": float(response == answer), "info": {"length": len(response)}}

def none(response):
    return None
"""


@pytest.fixture
def data(toml: Path) -> Path:
    """``toml`` with a data set and ``own_rewards.py``."""
    rows = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
    rows.append({"question": "12345678=", "answer": "0"})
    (toml.parent / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (toml.parent / "own_rewards.py").write_text(REWARDS)
    before, _, _ = toml.read_text().partition("[environment]")
    toml.write_text(
        before + '[environment]\nname = "dataset"\ndata = "train.jsonl"\nfields = { prompt = "question" }\n'
        '[environment.options]\nreward = "own_rewards:score"\nchat = false\n'
        "heldout_share = 0.25\nmax_prompt_tokens = 4\n"
    )
    return toml


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes, which find the package."""
    monkeypatch.setattr(environment_check, "WorkerPool", WorkerPool)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_episodes_are_shown(data: Path, capsys: pytest.CaptureFixture[str], pool: None) -> None:
    assert cli.main(["env", "check", str(data), "--episodes", "1"]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].startswith("train/0/")
    assert_names(lines[0], "random tokens", "prompt 4", "answer")
    assert any(", answered with the reference answer;" in line for line in lines)
    assert sum(line.startswith("heldout/") for line in lines) == 2
    assert sum(line.startswith("    prompt: ") for line in lines) == sum(
        line.startswith("    reward: ") for line in lines
    )
    assert "    reward:           1  length 1" in lines  # of the reference answer
    assert (
        shown.err.startswith(f"vcpo: note: {data.parent}/train.jsonl: 1 of ") and "left out: longer than" in shown.err
    )
    assert_said("vcpo env check", "all episodes came to their end", lines[-1])


@pytest.mark.parametrize(
    ("overrides", "code", "expected"),
    [
        (["environment.options.reward=own_rewards:none"], 1, "step raised RewardError: reward 'none' returned None"),
        (["environment.options.reward=own_rewards:nothing"], 2, "own_rewards.py has no 'nothing'"),
        (["environment.options.heldout_share=0.0"], 2, "it has no held-out prompts"),
        (["environment.name=datasets"], 2, "environment.name = 'datasets': unknown"),
        (["rollout.max_new_token=3"], 2, "rollout.max_new_token: unknown key"),
        (["model.path=/nowhere"], 2, "/nowhere"),
    ],
)
def test_what_is_wrong_is_one_line_and_an_exit_code(
    data: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], code: int, expected: str
) -> None:
    arguments = [word for override in overrides for word in ("--set", override)]
    assert cli.main(["env", "check", str(data), "--episodes", "1", *arguments]) == code
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "code"), [(["train", "--dry-run"], 2), (["train"], 2), (["doctor", "--config"], 1)]
)
def test_a_module_that_raises_is_a_problem_among_others(
    toml: Path, capsys: pytest.CaptureFixture[str], pool: None, command: list[str], code: int
) -> None:
    (toml.parent / "raises_at_import.py").write_text("1 / 0\n")
    text = toml.read_text().replace('"modular_sum"', '"raises_at_import:Task"')
    toml.write_text(text + "[algorithm]\nbase_ess_ratio = 2.0\n")
    assert cli.main([*command, str(toml)]) == code
    shown = capsys.readouterr()
    said = shown.out + shown.err
    assert "importing raises_at_import raised ZeroDivisionError: division by zero" in said
    assert "algorithm.base_ess_ratio = 2.0" in said and "Traceback" not in said


#: A user's code that starts processes which leave its worker's session.
DETACHED = """
import subprocess, sys

def start(*command):
    child = subprocess.Popen(command, start_new_session=True)
    with open(__file__ + ".pids", "a") as file:
        print(child.pid, file=file)
    return child

{}
def score(response):
    {}
    return 0.0
"""
_FORKS = (
    "import subprocess; c = subprocess.Popen(['sleep', '7777'], start_new_session=True); "
    "print(c.pid, file=open(__file__ + '.pids', 'a'))"
)


@pytest.mark.parametrize(
    ("command", "where"),
    [
        (["env", "check"], "at import"),
        (["env", "check"], "by a parent that ended"),
        (["train", "--dry-run"], "in a reward"),
    ],
)
def test_nothing_that_an_environment_started_is_left(data: Path, pool: None, command: list[str], where: str) -> None:
    if where == "by a parent that ended":
        start = f"""start(sys.executable, "-c", "__file__ = " + repr(__file__) + chr(10) + {_FORKS!r}).wait()"""
    else:
        start = "start('sleep', '7777')"
    at_import, in_reward = (start, "") if where != "in a reward" else ("", start)
    (data.parent / "detached.py").write_text(DETACHED.format(at_import, in_reward or "pass"))
    data.write_text(data.read_text().replace("own_rewards:score", "detached:score"))
    assert cli.main([*command, str(data)]) == 0
    started = [int(line) for line in (data.parent / "detached.py.pids").read_text().split()]
    assert len(started) >= 1 + (where == "by a parent that ended")
    left = [pid for pid in started if psutil.pid_exists(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.mark.parametrize("command", [["train", "--dry-run"], ["doctor", "--config"]])
def test_an_episode_is_played(data: Path, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    data.write_text(data.read_text().replace("own_rewards:score", "own_rewards:none"))
    assert cli.main([*command, str(data)]) in (1, 2)
    shown = capsys.readouterr()
    assert "step raised RewardError: reward 'none' returned None" in shown.out + shown.err


@pytest.mark.parametrize("command", [["train", "--dry-run"], ["doctor", "--config"]])
@pytest.mark.parametrize("key", ["launch.control_port", "launch.master_port", "rollout.port"])
def test_a_port_in_use_is_found(toml: Path, capsys: pytest.CaptureFixture[str], command: list[str], key: str) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        section, _, name = key.partition(".")
        toml.write_text(toml.read_text().replace(f"[{section}]\n", f"[{section}]\n{name} = {port}\n"))
        if f"[{section}]" not in toml.read_text():
            toml.write_text(toml.read_text() + f"[{section}]\n{name} = {port}\n")
        assert cli.main([*command, str(toml)]) in (1, 2)
    shown = capsys.readouterr()
    assert f"port {port} ({key}) is in use" in shown.out + shown.err


def test_max_new_tokens_below_what_the_task_needs(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(toml), "--dry-run", "--set", "rollout.max_new_tokens=7"]) == 2
    (line,) = errors(capsys)
    assert_names(line, "rollout.max_new_tokens = 7", "raise it to 8")


@pytest.mark.parametrize("example", sorted(path.parent.name for path in (ROOT / "examples").glob("*/run.toml")))
def test_every_example_can_be_played(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "examples" / example / "run.toml"
    if example == "arithmetic_smollm" and not (path.parent / "model").is_dir():
        pytest.skip("its model is not there (make test-smollm)")
    assert cli.main(["env", "check", str(path), "--episodes", "1"]) == 0, capsys.readouterr().err
