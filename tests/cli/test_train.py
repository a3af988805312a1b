"""``vcpo train``: what is settled and refused before anything starts, and what the supervisor is called with."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import done, errors, store, without_torch
from tests.messages import assert_names, assert_said
from vcpo_megatron.cli import main as cli
from vcpo_megatron.config.load import load_config, load_resolved
from vcpo_megatron.launch import local


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
    assert_said("vcpo train", "run directory is not empty", found[0], folder=full)
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
        (Path("r") / name).write_text("1\n")
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
    (line,) = errors(capsys)
    assert_said("vcpo train", "home of nobody", line)


def test_far_too_many_ranks_are_refused_at_once(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = time.process_time()
    assert cli.main(["train", str(toml), "--dry-run", "--set", "launch.learner_ranks=100000"]) == 2
    assert time.process_time() - begun < 5
    assert_said("vcpo train", "too many processes", errors(capsys)[-1])


def test_a_run_directory_that_is_a_file(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(toml), "--run-dir", str(toml)]) == 2
    assert errors(capsys) == [f"--run-dir {toml}: is a file; give a folder"]


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("a\0b", "holds a NUL character"),
        ("/proc/x/y", "cannot write in /proc"),
        ("/sys/x", "cannot write in /sys"),
        ("/proc/self/status/x", "cannot write in /proc/"),
    ],
)
def test_a_run_directory_that_can_never_be(
    toml: Path, started: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], path: str, says: str, more: list[str]
) -> None:
    assert cli.main(["train", str(toml), "--run-dir", path, *more]) == 2 and started == []
    (line,) = errors(capsys)
    assert line.startswith("--run-dir ") and says in line


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
    assert_names(note, "optimizer.lr (run: 0.001, file: 1e-06)", "train.seed (run: 3, file: 0)", "not used")


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


def test_a_checkpoint_that_is_not_there_is_refused_before_all_else(
    toml: Path, started: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    done(store(Path("r"), toml), 5, "")
    resume = ["train", str(toml), "--run-dir", "r", "--resume"]
    assert cli.main([*resume, "--from-step", "50"]) == 2
    (line,) = errors(capsys)
    assert_said("vcpo train", "no such checkpoint", line)
    (Path("r") / "checkpoints" / "step_5" / "manifest.json").write_text("")
    assert cli.main([*resume, "--dry-run"]) == 2 and started == []
    (line,) = errors(capsys)
    assert_said("vcpo train", "the only checkpoint is damaged", line)


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("rollouts.sqlite", None, "is missing, and the run has checkpoints that need it; put back the file"),
        ("rollouts.sqlite", "", "is empty, and the run has checkpoints that need it; put back the file"),
        ("rollouts.sqlite", "folder", "rollouts.sqlite: is no file; put the run's own one back"),
        ("history.jsonl", "folder", "history.jsonl: is no file; put the run's own one back"),
        ("metrics.jsonl", "folder", "metrics.jsonl: is no file; put the run's own one back"),
        ("attempts", "folder", "attempts: is no file; put the run's own one back"),
        ("attempts", "abc", "attempts holds no number; write the number of attempts made so far"),
        ("attempts", "", "attempts holds no number; write the number of attempts made so far"),
    ],
)
def test_what_a_resume_cannot_do_without_is_looked_at_first(
    toml: Path,
    started: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    file: str,
    content: str | None,
    says: str,
    more: list[str],
) -> None:
    done(store(Path("r"), toml), 2, "")
    path = Path("r") / file
    path.unlink(missing_ok=True)
    if content == "folder":
        path.mkdir()
        (path / "x").touch()
    elif content is not None:
        path.write_text(content)
    assert cli.main(["train", "--resume", "--run-dir", "r", *more]) == 2 and started == []
    (line,) = errors(capsys)
    assert line.startswith(f"rollout store {path}" if file == "rollouts.sqlite" and content != "folder" else str(path))
    assert says in line


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
    (line,) = errors(capsys)
    assert_said("vcpo train", "fewer steps than are done", line)
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
    if code:
        assert out == ""
    else:
        assert_said("vcpo train", "already finished", out)


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


def test_a_run_directory_says_all_that_a_resume_needs(
    toml: Path, started: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    store(Path("r"), toml, "train.seed=3")
    assert cli.main(["train", "--resume", "--run-dir", "r", "--set", "train.steps=9"]) == 7
    assert started[0]["config"] == load_config(toml, ["train.seed=3", "train.steps=9"])
    assert capsys.readouterr().err.removeprefix("vcpo: note: the resume changes ") == "train.steps: 5 -> 9\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "RUN.toml: missing; give the configuration"),
        (["--run-dir", "r"], "RUN.toml: missing; give the configuration"),
        (["--resume"], "--resume: which run? give its directory with --run-dir"),
    ],
)
def test_what_nothing_says_is_asked_for(
    toml: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *arguments]) == 2
    (line,) = errors(capsys)
    assert line.startswith(says)


@pytest.mark.parametrize("where", [[], ["--run-dir", "nowhere"]])
def test_nothing_to_resume(toml: Path, where: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(toml), "--resume", *where]) == 2
    assert len(errors(capsys)) == 1


def test_a_time_limit_and_an_older_checkpoint_are_passed_on(
    toml: Path, started: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done(directory := store(tmp_path / "run", toml), 4, "")
    arguments = ["train", str(toml), "--run-dir", str(directory), "--resume", "--from-step", "4", "--max-hours", "23.5"]
    assert cli.main(arguments) == 7
    assert started[0]["options"] == local.LaunchOptions(resume=True, from_step=4, max_hours=23.5)
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


# --- dry run ----------------------------------------------------------------------------------


def test_dry_run_without_torch(toml: Path, tmp_path: Path) -> None:
    changes = ["--set", "launch.learner_ranks=2", "--set", "parallel.tensor=2", "--set", "rollout.port=5000"]
    result = without_torch("train", str(toml), "--dry-run", "--run-dir", "x", *changes)
    assert (result.returncode, result.stderr) == (0, "")
    text, _, rest = result.stdout.partition("\nrole ")
    table, _, decided = rest.partition("\n\n")
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(text)
    assert load_resolved(resolved) == load_config(
        toml, ["launch.learner_ranks=2", "parallel.tensor=2", "rollout.port=5000"]
    )
    assert [row.split() for row in table.splitlines()[1:]] == [
        ["orchestrator", "0", "127.0.0.1", "cpu", "any", "free", "x/logs/orchestrator.0.log"],
        ["environment", "0", "127.0.0.1", "cpu", "-", "x/logs/environment.0.log"],
        ["environment", "1", "127.0.0.1", "cpu", "-", "x/logs/environment.1.log"],
        ["learner", "0", "127.0.0.1", "cpu", "any", "free", "x/logs/learner.0.log"],
        ["learner", "1", "127.0.0.1", "cpu", "-", "x/logs/learner.1.log"],
        ["server", "0", "127.0.0.1", "cpu", "5000", "x/logs/server.0.log"],
    ]
    assert decided.startswith("method ") and "rollout.port = 5000  (default 0)" in decided
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
