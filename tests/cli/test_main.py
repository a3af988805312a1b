"""What a user types, what it answers, and with which exit code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vcpo_megatron.cli import main as cli
from vcpo_megatron.cli import train as cli_train
from vcpo_megatron.config.load import load_config, load_resolved
from vcpo_megatron.launch import local

ROOT = Path(__file__).parents[2]


@pytest.fixture
def toml(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration that passes every check; the working directory is a folder of its own."""
    path = tmp_path / "job" / "run.toml"
    path.parent.mkdir()
    path.write_text(
        '[model]\npath = "../model"\n[train]\nsteps = 5\ngroups_per_step = 2\ngroup_size = 4\n'
        '[rollout]\nmax_new_tokens = 8\n[environment]\nname = "modular_sum"\n'
    )
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Takes the place of the supervisor; what it was called with."""
    calls: list[dict[str, Any]] = []

    def run(config: Any, directory: Any, options: Any) -> int:
        calls.append({"config": config, "directory": directory.path, "resume": options.resume, "options": options})
        return 7

    monkeypatch.setattr(local, "run", run)
    return calls


def store(directory: Path, toml: Path, *overrides: str) -> Path:
    """A run directory as an earlier start left it."""
    from vcpo_megatron.config.load import dump_resolved

    directory.mkdir(parents=True)
    (directory / "resolved.toml").write_text(dump_resolved(load_config(toml, overrides)))
    return directory


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("vcpo: error: ") for line in lines)
    return [line.removeprefix("vcpo: error: ") for line in lines]


# --- usage ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["serve", "--help"], ["doctor", "--help"]])
def test_every_help_shows_an_example(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 0
    command = arguments[0] if len(arguments) == 2 else "train"
    assert f"example: vcpo {command}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("arguments", [[], ["nope"], ["train"], ["serve", "m", "--port", "70000"], ["doctor", "x"]])
def test_bad_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


# --- train ------------------------------------------------------------------------------------


def test_train_starts_the_run_and_returns_its_code(toml: Path, started: list[dict[str, Any]]) -> None:
    assert cli.main(["train", str(toml), "--set", "train.steps=9", "--run-dir", "here"]) == 7
    (call,) = started
    assert call["config"] == load_config(toml, ["train.steps=9"])
    assert (call["directory"], call["resume"]) == (Path("here"), False)


def test_the_default_run_directory_is_named_after_the_example(toml: Path, started: list[dict[str, Any]]) -> None:
    cli.main(["train", str(toml)])
    name = started[0]["directory"]
    assert name.parent == Path("runs") and time.strptime(name.name, "job-%Y%m%d-%H%M%S")
    other = toml.with_name("other.toml")
    other.write_text(toml.read_text())
    cli.main(["train", str(other)])
    assert started[1]["directory"].name.startswith("other-")


def test_two_runs_in_one_second_get_two_directories(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda form: "20300101-000000")
    first = cli_train._new_run_directory(toml)
    first.mkdir(parents=True)
    assert cli_train._new_run_directory(toml).name == "job-20300101-000000-2"


def test_all_problems_are_printed_together(
    toml: Path, started: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    arguments = ["train", str(toml), "--run-dir", str(full)]
    for override in ("train.group_size=1", "environment.options.digitz=3", "algorithm.base_ess_ratio=2.0"):
        arguments += ["--set", override]
    assert cli.main(arguments) == 2
    found = errors(capsys)
    assert started == [] and len(found) == 4
    assert found[0] == f"--run-dir {full}: exists and is not empty; give another one, or --resume"
    assert any(line.startswith("algorithm.base_ess_ratio = 2.0") for line in found)
    assert any(line.startswith("train.group_size = 1") for line in found)
    assert any("digitz" in line for line in found)


def test_a_file_that_is_missing_is_named_once(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(toml), "--set", "environment.data=none.jsonl"]) == 2
    (line,) = errors(capsys)
    assert line.startswith("environment.data = ") and line.endswith("no such file")


def test_a_bad_key_is_2(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(toml), "--set", "train.step=1"]) == 2
    assert errors(capsys) == ["train.step: unknown key; did you mean train.steps?"]


def test_what_a_failed_start_leaves_is_no_obstacle(toml: Path, started: list[dict[str, Any]]) -> None:
    (Path("r") / "logs").mkdir(parents=True)
    for name in (".lock", "attempts", "resolved.toml"):
        (Path("r") / name).touch()
    assert cli.main(["train", str(toml), "--run-dir", "r"]) == 7


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_run_directory_with_too_long_a_name(
    toml: Path, capsys: pytest.CaptureFixture[str], resume: list[str]
) -> None:
    assert cli.main(["train", str(toml), "--run-dir", "x" * 300, *resume]) == 2
    (line,) = errors(capsys)
    assert line.startswith("x" * 300) and line.endswith(": File name too long")


def test_a_home_of_nobody(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(toml), "--set", "model.path=~nosuchuser/x"]) == 2
    assert errors(capsys) == ['model.path = "~nosuchuser/x": there is no such user; give another path']


def test_far_too_many_ranks_are_refused_at_once(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = time.process_time()
    assert cli.main(["train", str(toml), "--dry-run", "--set", "launch.learner_ranks=100000"]) == 2
    assert time.process_time() - begun < 5
    line = errors(capsys)[-1]
    assert line == (
        "launch.learner_ranks = 100000 and rollout.servers = 1 are 100001 processes, one host runs at most 512; "
        "lower them"
    )


@pytest.mark.parametrize(
    ("redirection", "code", "says"),
    [("> /dev/full", 2, "vcpo: error: standard output: No space left on device\n"), ("| true", 141, "")],
)
def test_output_that_cannot_be_written(toml: Path, redirection: str, code: int, says: str) -> None:
    wait = "sleep 1; " if redirection.startswith("|") else ""  # the reader is gone by then
    command = f"({wait}exec {sys.executable} -m vcpo_megatron train {toml} --dry-run) {redirection}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (code, says)


def test_a_run_directory_that_is_a_file(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(toml), "--run-dir", str(toml)]) == 2
    assert errors(capsys) == [f"--run-dir {toml}: is a file; give a folder"]


# --- resume -----------------------------------------------------------------------------------


def test_resume_uses_the_stored_configuration(
    toml: Path, started: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    store(Path("r"), toml, "train.seed=3", "optimizer.lr=1e-3")
    assert cli.main(["train", str(toml), "--run-dir", "r", "--resume", "--set", "train.steps=50"]) == 7
    (call,) = started
    assert call["config"] == load_config(toml, ["train.seed=3", "optimizer.lr=1e-3", "train.steps=50"])
    assert call["resume"] is True
    note = capsys.readouterr().err
    assert "differs in optimizer.lr (run: 0.001, file: 1e-06), train.seed (run: 3, file: 0): not used" in note


def test_resume_with_the_stored_file_itself_says_nothing(
    toml: Path, started: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    store(Path("r"), toml, "train.seed=3")
    assert cli.main(["train", "r/resolved.toml", "--run-dir", "r", "--resume"]) == 7
    assert capsys.readouterr().err == ""


def test_resume_refuses_what_cannot_change(
    toml: Path, started: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    store(Path("r"), toml)
    changes = ["--set", "train.seed=1", "--set", "algorithm.baseline=zero", "--set", "train.steps=6"]
    assert cli.main(["train", str(toml), "--run-dir", "r", "--resume", *changes]) == 2
    assert started == []
    assert [line.split(":")[0] for line in errors(capsys)] == ["algorithm.baseline = zero", "train.seed = 1"]


def done(directory: Path, step: int, rows: str) -> None:
    """A complete checkpoint after ``step`` steps, and the rows of the run."""
    from vcpo_megatron.run.directory import Manifest, RunDirectory

    run = RunDirectory(directory)
    run.checkpoint(step).mkdir(parents=True)
    run.complete(step, Manifest(step=step, attempt=1, version_number=step, learner={}, orchestrator={}))
    run.metrics.write_text(rows)


def test_a_checkpoint_that_is_not_there_is_refused_before_all_else(
    toml: Path, started: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    done(store(Path("r"), toml), 5, "")
    resume = ["train", str(toml), "--run-dir", "r", "--resume"]
    assert cli.main([*resume, "--from-step", "50"]) == 2
    assert errors(capsys) == ["--from-step 50: r/checkpoints/step_50 is no complete checkpoint; complete are: step_5"]
    (Path("r") / "checkpoints" / "step_5" / "manifest.json").write_text("")
    assert cli.main([*resume, "--dry-run"]) == 2 and started == []
    assert errors(capsys) == [
        "r/checkpoints/step_5 is damaged (manifest.json cannot be read): put its files back, or start a new run in "
        "another --run-dir"
    ]


def test_the_model_may_have_moved_once_a_checkpoint_says_what_it_is(
    toml: Path, started: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    before = load_config(toml, []).model.path
    shutil.copytree(before, "moved")
    resume = ["train", str(toml), "--run-dir", "r", "--resume", "--set", "model.path=moved"]
    store(Path("r"), toml)
    assert cli.main(resume) == 2 and errors(capsys)[0].startswith("model.path = ")
    done(Path("r"), 2, "")
    assert cli.main(resume) == 7
    assert started[0]["config"].model.path == Path("moved").absolute()


def test_fewer_steps_than_are_done_are_refused(
    toml: Path, started: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    done(store(Path("r"), toml), 5, '{"step": 4, "eval/version": 5}\n')
    assert cli.main(["train", str(toml), "--run-dir", "r", "--resume", "--set", "train.steps=4"]) == 2
    assert errors(capsys) == ["--resume: 5 steps are done already: train.steps = 4 is less; raise train.steps above 5"]
    assert started == []


@pytest.mark.parametrize(
    ("row", "settings", "code"),
    [
        ('{"step": 4, "eval/version": 5}\n', [], 0),
        ('{"step": 4}\n', [], 7),  # the last version is not evaluated yet
        ('{"step": 4}\n', ["--set", "train.eval_every=0"], 0),
        ('{"step": 4, "eval/version": 5}\n', ["--set", "train.steps=6"], 7),
    ],
)
def test_a_finished_run_starts_nothing(
    toml: Path,
    started: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    row: str,
    settings: list[str],
    code: int,
) -> None:
    done(store(Path("r"), toml), 5, row)
    assert cli.main(["train", str(toml), "--run-dir", "r", "--resume", *settings]) == code
    out = capsys.readouterr().out
    assert len(started) == (code == 7)
    assert out == (
        "" if code else "r: already finished: all 5 steps are done; to go on, raise train.steps (--set train.steps=N)\n"
    )


def test_another_layout_goes_on_with_the_run(toml: Path, started: list[dict[str, Any]]) -> None:
    store(Path("r"), toml, "parallel.tensor=2", "launch.learner_ranks=2")
    layout = ["parallel.tensor=1", "launch.learner_ranks=1", "rollout.servers=2", "rollout.port=0"]
    changes = [word for setting in layout for word in ("--set", setting)]
    assert cli.main(["train", str(toml), "--run-dir", "r", "--resume", *changes]) == 7
    config = started[0]["config"]
    assert (config.parallel.tensor, config.launch.learner_ranks, config.rollout.servers) == (1, 1, 2)


def test_resume_without_a_directory_takes_the_newest(toml: Path, started: list[dict[str, Any]]) -> None:
    for number, name in enumerate(["job-20200101-000000", "job-20200101-000000-2", "job-20190101-000000"]):
        store(Path("runs") / name, toml)
        os.utime(Path("runs") / name / "resolved.toml", (1000 + number % 2, 1000 + number % 2))
    Path("runs/job-20300101-000000").mkdir()
    store(Path("runs/jobless-20400101-000000"), toml)
    assert cli.main(["train", str(toml), "--resume"]) == 7
    assert started[0]["directory"] == Path("runs/job-20200101-000000-2")


@pytest.mark.parametrize("where", [[], ["--run-dir", "nowhere"]])
def test_nothing_to_resume(toml: Path, where: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(toml), "--resume", *where]) == 2
    assert len(errors(capsys)) == 1


def test_every_changeable_key_exists() -> None:
    from vcpo_megatron.config.schema import RunConfig

    known = {f"{name}.{key}" for name, field in RunConfig.model_fields.items() for key in field.annotation.model_fields}
    assert cli_train.CHANGEABLE_ON_RESUME <= known


# --- dry run ----------------------------------------------------------------------------------

WITHOUT_TORCH = """
import sys, time

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "megatron", "transformers"}:
            raise ImportError(f"{name} is blocked in this test")

sys.meta_path.insert(0, Blocked())
from vcpo_megatron.cli.main import main
code = main(sys.argv[1:])
sys.exit(code)
"""


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_dry_run_without_torch(toml: Path, tmp_path: Path) -> None:
    changes = ["--set", "launch.learner_ranks=2", "--set", "parallel.tensor=2", "--set", "rollout.port=5000"]
    result = without_torch("train", str(toml), "--dry-run", "--run-dir", "x", *changes)
    assert (result.returncode, result.stderr) == (0, "")
    text, _, table = result.stdout.partition("\nrole ")
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(text)
    assert load_resolved(resolved) == load_config(
        toml, ["launch.learner_ranks=2", "parallel.tensor=2", "rollout.port=5000"]
    )
    assert [row.split() for row in table.splitlines()[1:]] == [
        ["orchestrator", "0", "127.0.0.1", "cpu", "any", "free", "x/logs/orchestrator.0.log"],
        ["learner", "0", "127.0.0.1", "cpu", "any", "free", "x/logs/learner.0.log"],
        ["learner", "1", "127.0.0.1", "cpu", "-", "x/logs/learner.1.log"],
        ["server", "0", "127.0.0.1", "cpu", "5000", "x/logs/server.0.log"],
    ]
    assert not Path("x").exists() and not Path("runs").exists()


def test_dry_run_takes_less_than_two_seconds(toml: Path) -> None:
    """CPU time of the process, since the wall clock is shared with other tests."""
    before = os.times()
    assert without_torch("train", str(toml), "--dry-run").returncode == 0
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 2.0


def test_dry_run_of_a_bad_configuration_is_2(toml: Path) -> None:
    result = without_torch("train", str(toml), "--dry-run", "--set", "train.group_size=1")
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("vcpo: error: train.group_size = 1: ")


# --- serve, doctor ----------------------------------------------------------------------------


def test_serve_refuses_a_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", str(tmp_path / "none")]) == 2
    (line,) = errors(capsys)
    assert "no such folder" in line


def test_serve_until_a_signal(model_folder: Path) -> None:
    command = [sys.executable, "-m", "vcpo_megatron", "serve", str(model_folder), "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watchdog = threading.Timer(90, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        assert re.match(rf"vcpo: serving {model_folder} at http://127.0.0.1:\d+$", process.stdout.readline())
        process.terminate()
        assert process.wait(timeout=30) == 0
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


def test_doctor_passes_where_the_tests_run(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--config", str(toml)]) == 0
    report = capsys.readouterr().out
    assert f"{toml} can run" in report and "megatron-core" in report


def test_doctor_fails_on_a_bad_configuration(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml.write_text(toml.read_text() + "[algorithm]\nbase_ess_ratio = 2.0\n")
    assert cli.main(["doctor", "--config", str(toml)]) == 1
    assert "algorithm.base_ess_ratio = 2.0: must be" in capsys.readouterr().out


def test_doctor_without_torch() -> None:
    assert without_torch("doctor").returncode == 0


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    (version,) = re.findall(r'version="(.+)"', (ROOT / "setup.py").read_text())
    assert (caught.value.code, capsys.readouterr().out) == (0, f"vcpo {version}\n")


def test_cheap_refusals_of_convert_need_no_torch(tmp_path: Path) -> None:
    here, missing, other = str(tmp_path / "here"), str(tmp_path / "none"), str(tmp_path / "other")
    for folder in (here, other):
        Path(folder).mkdir()
    for arguments, says in (
        (["import", missing, "out"], f"{missing} does not exist or is not a folder"),
        (["import", here, other], f"{other} exists: give another name, or remove it"),
        (["export", missing, "out"], f"{missing} does not exist or is not a folder"),
        (["verify", here, missing], f"{missing} does not exist or is not a folder"),
    ):
        result = without_torch("convert", *arguments)
        assert (result.returncode, result.stderr) == (1, f"vcpo: error: {says}\n")


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "vcpo_megatron", "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0 and result.stdout.startswith("usage: vcpo ")


def test_the_console_script_is_the_same() -> None:
    assert 'console_scripts": ["vcpo = vcpo_megatron.cli.main:main"]' in (ROOT / "setup.py").read_text()
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["timeout"] == 120


def test_a_time_limit_and_an_older_checkpoint_are_passed_on(
    toml: Path, started: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done(directory := store(tmp_path / "run", toml), 4, "")
    arguments = ["train", str(toml), "--run-dir", str(directory), "--resume", "--from-step", "4", "--max-hours", "23.5"]
    assert cli.main(arguments) == 7
    assert started[0]["options"] == local.Options(resume=True, from_step=4, max_hours=23.5)
    assert cli.main(["train", str(toml), "--from-step", "4"]) == 2
    assert "--from-step: only with --resume" in capsys.readouterr().err
    for hours in ("0", "-1", "nan", "inf", "soon"):
        with pytest.raises(SystemExit):
            cli.main(["train", str(toml), "--max-hours", hours])


def make_interrupted(*_: Any, **__: Any) -> int:
    raise KeyboardInterrupt


def test_an_interrupt_before_the_start_is_130(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted: Callable[..., int] = make_interrupted
    monkeypatch.setattr(local, "run", interrupted)
    assert cli.main(["train", str(toml)]) == 130
