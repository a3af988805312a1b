"""What a resume takes from the run directory, what it may change, and what a run fixes at its start."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import done, store
from tests.messages import assert_names
from vcpo_megatron.config.load import dump_resolved, load_config, load_resolved, written
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.launch.resume import (
    CHANGEABLE_ON_RESUME,
    beyond_schedule,
    changes,
    ignored_changes,
    resumed_config,
)
from vcpo_megatron.launch.start import settled
from vcpo_megatron.run.directory import RunDirectory
from vcpo_megatron.run.errors import ConfigError
from vcpo_megatron.run.history import record

DAY = datetime.date(2026, 1, 31)
RUN = (
    '[model]\npath = "m"\n[train]\nsteps = 50\n[environment]\nname = "e"\n[staleness]\nmax_staleness = 4\n'
    '[optimizer]\nlr = 1e-3\nschedule = "cosine"\n'
)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


@pytest.fixture
def directory(toml: Path, tmp_path: Path) -> RunDirectory:
    """A run that has begun, and has a checkpoint of 40 steps."""
    directory = RunDirectory(tmp_path / "run")
    store(directory.path, toml)
    begin(directory, settled(load_config(toml), DAY))
    done(directory.path, 40, "")
    return directory


def begin(directory: RunDirectory, config: RunConfig) -> None:
    directory.resolved.write_text(dump_resolved(config))
    directory.make_checkpoints()
    record(directory, attempt=1, step=None, values=written(config))


def edit(directory: RunDirectory, before: str, after: str) -> None:
    text = directory.resolved.read_text()
    assert text.count(before) == 1, text
    directory.resolved.write_text(text.replace(before, after))


def refused(directory: RunDirectory, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resumed_config(directory, overrides)
    return caught.value.problems


def test_every_changeable_key_exists() -> None:
    known = {f"{name}.{key}" for name, field in RunConfig.model_fields.items() for key in field.annotation.model_fields}
    assert CHANGEABLE_ON_RESUME <= known


# --- the copy in the run directory ------------------------------------------------------------

EDITS = [
    ("algorithm.method", 'method = "vcpo"', 'method = "grpo"', '"vcpo"'),
    ("rollout.temperature", "temperature = 1.0", "temperature = 0.7", "1.0"),
    ("rollout.max_new_tokens", "max_new_tokens = 1024", "max_new_tokens = 512", "1024"),
    ("train.seed", "seed = 0", "seed = 1", "0"),
    ("environment.date", "date = 2026-01-31", "date = 2026-02-01", "2026-01-31"),
    ("algorithm.baseline", 'method = "vcpo"', 'method = "vcpo"\nbaseline = "zero"', "not set"),
    ("optimizer.lr", "lr = 0.001", "lr = 0.002", "0.001"),
    ("optimizer.schedule_steps", "schedule_steps = 50", "schedule_steps = 90", "50"),
    ("staleness.max_staleness", "max_staleness = 4", "max_staleness = 5", "4"),
]


@pytest.mark.parametrize("with_checkpoint", [True, False])
@pytest.mark.parametrize(("key", "before", "after", "value"), EDITS, ids=[row[0] for row in EDITS])
def test_an_edited_copy_is_refused_by_key(
    directory: RunDirectory, key: str, before: str, after: str, value: str, with_checkpoint: bool
) -> None:
    if not with_checkpoint:
        (directory.checkpoints / "latest").unlink()
        directory.checkpoint(40).rename(directory.path / "elsewhere")
    edit(directory, before, after)
    (line,) = refused(directory)
    found = after.rpartition(" = ")[2]
    assert_names(line, f"{key} = {found} in {directory.resolved}", f"the run has {value}")
    assert f"put {value} back" in line
    by_set = key.partition(".")[0] in ("optimizer", "staleness")
    assert line.endswith(f"--resume --set {key}={found}" if by_set else f"--set train.start_from={directory.path}")
    edit(directory, after, before)
    assert resumed_config(directory, []) == load_resolved(directory.resolved)


def test_all_edited_keys_are_named_and_those_that_change_nothing_of_the_training_are_free(
    directory: RunDirectory,
) -> None:
    edit(directory, "seed = 0", "seed = 1")
    edit(directory, "temperature = 1.0", "temperature = 0.5")
    edit(directory, "watchdog_s = 120.0", "watchdog_s = 60.0")
    edit(directory, 'path = "', 'path = "/elsewhere')  # the learner compares the model itself
    assert [line.split(" = ")[0] for line in refused(directory)] == ["train.seed", "rollout.temperature"]
    edit(directory, "seed = 1", "seed = 0")
    edit(directory, "temperature = 0.5", "temperature = 1.0")
    config = resumed_config(directory, [])
    assert config.observability.watchdog_s == 60.0
    assert [line for line in changes(directory, config) if "path" not in line] == [
        "observability.watchdog_s: 120.0 -> 60.0"
    ]


def test_what_was_changed_by_set_is_the_run_s_from_then_on(directory: RunDirectory) -> None:
    config = resumed_config(directory, ["optimizer.lr=0.002"])
    assert changes(directory, config) == ["optimizer.lr: 0.001 -> 0.002"]
    record(directory, attempt=2, step=40, values=written(config))
    assert resumed_config(directory, []).optimizer.lr == 0.001  # the attempt died before it took the copy over
    directory.resolved.write_text(dump_resolved(config))
    assert resumed_config(directory, []).optimizer.lr == 0.002
    edit(directory, "lr = 0.002", "lr = 0.003")
    assert refused(directory)[0].startswith("optimizer.lr = 0.003 in ")


# --- changes ----------------------------------------------------------------------------------

ALLOWED = [
    ("optimizer.lr", 2e-3),
    ("optimizer.min_lr", 1e-5),
    ("optimizer.clip_grad", 0.5),
    ("optimizer.weight_decay", 0.0),
    ("optimizer.schedule_steps", 80),
    ("train.steps", 90),
    ("train.eval_every", 7),
    ("staleness.max_staleness", 9),
    ("checkpoint.every", 3),
    ("observability.mismatch_warning", 0.5),
]


@pytest.mark.parametrize(("key", "value"), ALLOWED, ids=[key for key, _ in ALLOWED])
def test_what_a_resume_may_change(directory: RunDirectory, key: str, value: Any) -> None:
    config = resumed_config(directory, [f"{key}={value}"])
    section, name = key.split(".")
    assert getattr(getattr(config, section), name) == value
    assert re.fullmatch(rf"{key}: \S+ -> {value}", changes(directory, config)[0])
    assert key in CHANGEABLE_ON_RESUME


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("staleness.max_staleness=3", "and a resume may only raise this"),
        ("train.group_size=4", "and this cannot change on resume"),
        ("rollout.temperature=0.5", "and this cannot change on resume"),
        ("environment.options.digits=3", "and this cannot change on resume"),
        ("train.start_from=/x", "and this cannot change on resume"),
        ("optimizer.betas=[0.5, 0.5]", "and this cannot change on resume"),
    ],
)
def test_anything_else_is_refused_and_the_way_is_named(directory: RunDirectory, change: str, why: str) -> None:
    (line,) = refused(directory, change)
    assert line.startswith(f"{change.partition('=')[0].removesuffix('.digits')} = ") and why in line
    assert line.endswith(f", --set train.start_from={directory.path}")


def test_in_exact_lag_the_lag_stays(toml: Path, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    store(directory.path, toml, "staleness.lag=exact")
    (line,) = refused(directory, "staleness.max_staleness=5")
    assert line.startswith("staleness.max_staleness = 5: ") and 'with lag = "exact" this cannot change' in line


def test_in_exact_lag_what_was_not_sampled_cannot_be_added(toml: Path, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    store(directory.path, toml, "staleness.lag=exact")  # 50 steps, 4 versions
    done(directory.path, 46, "")
    assert resumed_config(directory, ["train.steps=60"]).train.steps == 60
    done(directory.path, 47, "")
    (line,) = refused(directory, "train.steps=60")
    assert line.startswith("train.steps = 60: ") and "before step_47 would have sampled" in line
    assert_names(line, "--from-step 46")
    assert resumed_config(directory, ["train.steps=60"], 46).train.steps == 60
    assert resumed_config(directory, ["train.steps=48"]).train.steps == 48


# --- the start --------------------------------------------------------------------------------


def test_what_a_run_fixes_at_its_start(toml: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "source")
    store(run.path, toml)
    for step in (10, 20):
        done(run.path, step, "")
    config = settled(load_config(toml, [f"train.start_from={run.path}"]), DAY)
    assert config.optimizer.schedule_steps == 50 and config.environment.date == DAY
    assert config.train.start_from == run.checkpoint(20)
    done(run.path, 30, "")
    assert settled(config, DAY + datetime.timedelta(1)) == config  # whatever has changed since
    given = settled(load_config(toml, ["optimizer.schedule=constant", "environment.date=2020-02-02"]), DAY)
    assert given.optimizer.schedule_steps is None and given.environment.date == datetime.date(2020, 2, 2)


def test_what_was_fixed_is_no_difference_to_the_file(toml: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "source")
    store(run.path, toml)
    done(run.path, 10, "")
    more = [f"train.start_from={run.path}"]
    config = settled(load_config(toml, more), DAY)
    assert ignored_changes(config, toml, more) == []
    other = [f"train.start_from={tmp_path}/other", "optimizer.schedule_steps=3"]
    assert [line.split(" ")[0] for line in ignored_changes(config, toml, other)] == [
        "optimizer.schedule_steps",
        "train.start_from",
    ]


def test_a_longer_run_keeps_its_schedule(directory: RunDirectory) -> None:
    config = resumed_config(directory, ["train.steps=500"])
    assert config.train.steps == 500 and config.optimizer.schedule_steps == 50
    (line,) = beyond_schedule(config)
    assert "ends with step 49" in line and line.endswith("later steps are taken at optimizer.min_lr = 0")
    assert beyond_schedule(resumed_config(directory, ["train.steps=500", "optimizer.schedule_steps=500"])) == []
    assert beyond_schedule(resumed_config(directory, [])) == []


def test_a_lost_copy_of_the_configuration_is_told_from_a_run_that_never_began(
    directory: RunDirectory, tmp_path: Path
) -> None:
    directory.resolved.unlink()
    empty = RunDirectory(tmp_path / "empty")
    empty.path.mkdir()
    for run, remedy in (
        (directory, "in its place"),
        (empty, "without --resume"),
        (RunDirectory(tmp_path / "none"), ""),
    ):
        with pytest.raises(ConfigError) as caught:
            resumed_config(run, [])
        (problem,) = caught.value.problems
        assert str(run.path) in problem and "resolved.toml" in problem and remedy in problem
        assert ("in its place" in problem) == (run is directory)
