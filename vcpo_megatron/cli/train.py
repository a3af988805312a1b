"""``vcpo train``: settle configuration and run directory, report every problem at once, then start.

A resumed run goes on with the configuration that its directory holds; ``--set`` may change what touches neither the
policy nor what it is trained on.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import DONE, add_command, refuse

if TYPE_CHECKING:
    from ..config.schema import RunConfig
    from ..launch.placement import Plan

#: Keys that a resumed run may change: they touch neither the policy nor what it is trained on.
_CHANGEABLE = {
    "train": "eval_every max_pack_tokens steps",
    "rollout": (
        "addresses args bucket_bytes health_interval_s health_timeout_s max_failure_ratio max_prompt_failures "
        "max_restarts max_running_requests on_failure pause_mode port python request_timeout_s servers start_timeout_s "
        "sync sync_timeout_s sync_wave tensor_parallel verify_sync"
    ),
    "staleness": "adaptive adaptive_ess wait_s",
    "checkpoint": "every export_hf_every keep_best keep_last keep_rollouts resume_partial",
    "parallel": "context expert expert_dispatcher expert_tensor pipeline sequence_parallel tensor virtual_pipeline",
    "launch": "control_port grace_s learner_ranks master_port timeout_s",
    "observability": "tensorboard watchdog_s",
}
CHANGEABLE_ON_RESUME = frozenset(f"{section}.{key}" for section, keys in _CHANGEABLE.items() for key in keys.split())


def add_train(commands: Any) -> None:
    """Add ``train`` to the commands of ``vcpo``."""
    parser = add_command(
        commands,
        "train",
        _train,
        help="train a model",
        description="Train a model as a configuration file says.",
        example="vcpo train examples/modular_sum_cpu/run.toml --set train.steps=40 --run-dir runs/first",
    )
    parser.add_argument("config", type=Path, metavar="RUN.toml", help="the configuration")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one key, as in optimizer.lr=1e-6; repeatable; paths are taken from the working directory",
    )
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="default: runs/NAME-TIMESTAMP")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest complete checkpoint of --run-dir (default: of the newest runs/NAME-*), "
        "with the configuration stored there",
    )
    parser.add_argument(
        "--from-step",
        type=int,
        metavar="N",
        help="with --resume: go back to the complete checkpoint step_N; newer ones are moved to checkpoints/abandoned",
    )
    parser.add_argument(
        "--max-hours",
        type=_hours,
        metavar="H",
        help="stop after H hours, with a checkpoint and exit code 138; SIGUSR1 does the same at any time",
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would run, start nothing")


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = 0.0
    if not 0 < hours < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give a number of hours above 0, as in 23.5")
    return hours


@dataclass(frozen=True)
class _Run:
    """What ``train`` settled on before anything is started."""

    config: RunConfig
    directory: Path
    notes: tuple[str, ...] = ()


def _train(args: argparse.Namespace) -> int:
    from ..config.load import dump_resolved
    from ..run.errors import ConfigError

    try:
        if args.from_step is not None and not args.resume:
            raise ConfigError(["--from-step: only with --resume"])
        run = _resumed_run(args) if args.resume else _fresh_run(args)
        plan = _plan(run.config, [*_run_directory_problems(run, args.resume), *config_problems(run.config)])
    except ConfigError as error:
        return refuse(error.problems)
    for note in run.notes:
        print(f"vcpo: {note}", file=sys.stderr)
    if args.resume and args.from_step is None and _is_finished(run):
        print(
            f"{run.directory}: already finished: all {run.config.train.steps} steps are done; to go on, raise "
            "train.steps (--set train.steps=N)"
        )
        return DONE
    if args.dry_run:
        print(dump_resolved(run.config))
        print(_describe(plan, run.directory))
        return DONE

    from ..launch import local
    from ..run.directory import RunDirectory

    options = local.Options(args.resume, args.from_step, args.max_hours)
    return local.run(run.config, RunDirectory(run.directory), options)


def _fresh_run(args: argparse.Namespace) -> _Run:
    from ..config.load import load_config

    return _Run(load_config(args.config, args.overrides), args.run_dir or _new_run_directory(args.config))


def _resumed_run(args: argparse.Namespace) -> _Run:
    """The stored configuration with ``--set`` applied; ConfigError when a change does not go with resuming."""
    from ..config.load import flatten, load_config, load_resolved, with_overrides
    from ..run.directory import RunDirectory
    from ..run.errors import ConfigError

    directory = args.run_dir or _newest_run_directory(args.config)
    resolved = RunDirectory(directory).resolved
    if not resolved.is_file():
        what = "holds no run yet; start it without --resume" if directory.is_dir() else "is no run directory"
        raise ConfigError([f"--resume: {directory} {what} (there is no resolved.toml)"])
    stored = load_resolved(resolved)
    config = with_overrides(stored, args.overrides)
    before, after = flatten(stored), flatten(config)
    done = _checkpoint_to_resume(directory, args.from_step)
    moved = {"model.path"} if done else set()  # the learner compares what is there with the checkpoint's facts
    refused = [
        f"{key} = {after[key]}: the run in {directory} has {before[key]}, and this cannot change on resume; "
        "leave it, or start a new run"
        for key in after
        if after[key] != before[key] and key not in CHANGEABLE_ON_RESUME | moved
    ]
    if refused:
        raise ConfigError(refused)
    if config.train.steps < done:
        raise ConfigError(
            [
                f"--resume: {done} steps are done already: train.steps = {config.train.steps} is less; raise "
                f"train.steps above {done}"
            ]
        )
    given = flatten(load_config(args.config, args.overrides))
    differing = [f"{key} (run: {after[key]}, file: {given[key]})" for key in after if given[key] != after[key]]
    note = f"resuming with {resolved}; {args.config} differs in {', '.join(differing)}: not used"
    return _Run(config, directory, (note,) if differing else ())


def _checkpoint_to_resume(directory: Path, wanted: int | None) -> int:
    """Step of the checkpoint that a resume goes back to, 0 where there was none; ConfigError when it is not there."""
    from ..launch.workspace import RunDirectoryError, chosen_checkpoint
    from ..run.directory import RunDirectory
    from ..run.errors import ConfigError

    try:
        return chosen_checkpoint(RunDirectory(directory), wanted) or 0
    except RunDirectoryError as error:
        raise ConfigError([str(error)]) from None


def _steps_done(directory: Path) -> int:
    """Steps that the checkpoint has behind it from which the run in ``directory`` goes on."""
    from ..run.directory import RunDirectory

    return max(RunDirectory(directory).complete_steps(), default=0)


def _is_finished(run: _Run) -> bool:
    """Whether a resume has nothing to do: neither a step nor the evaluation of the last version is missing."""
    from ..observability.sinks import read_rows
    from ..run.directory import RunDirectory

    steps = run.config.train.steps
    if _steps_done(run.directory) < steps:
        return False
    if run.config.train.eval_every == 0 or run.config.rollout.engine == "replay":
        return True
    rows = read_rows(RunDirectory(run.directory).metrics)
    return not rows or rows[-1].get("eval/version") == steps


def _run_name(config: Path) -> str:
    """Folder of the example for examples/NAME/run.toml, else the file's own name."""
    return config.absolute().parent.name if config.stem == "run" else config.stem


def _new_run_directory(config: Path) -> Path:
    first = Path("runs") / f"{_run_name(config)}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidate, number = first, 1
    while candidate.exists():
        number += 1
        candidate = first.with_name(f"{first.name}-{number}")
    return candidate


def _newest_run_directory(config: Path) -> Path:
    """The newest of runs/NAME-*; ConfigError when there is none."""
    from ..run.errors import ConfigError

    pattern = f"{_run_name(config)}-[0-9]*-[0-9]*"
    found = [path.parent for path in Path("runs").glob(f"{pattern}/resolved.toml")]
    if not found:
        raise ConfigError([f"--resume: no run directory runs/{_run_name(config)}-*; give one with --run-dir"])
    return max(found, key=lambda path: (path / "resolved.toml").stat().st_mtime)


def _run_directory_problems(run: _Run, resume: bool) -> list[str]:
    directory = run.directory
    if directory.exists() and not directory.is_dir():
        return [f"--run-dir {directory}: is a file; give a folder"]
    found = []
    if not resume and directory.is_dir() and not all(_is_left_over(path.name) for path in directory.iterdir()):
        found.append(f"--run-dir {directory}: exists and is not empty; give another one, or --resume")
    ancestor = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    if not (ancestor.is_dir() and os.access(ancestor, os.W_OK | os.X_OK)):
        found.append(f"--run-dir {directory}: cannot write in {ancestor}; give another one")
    return found


def _is_left_over(name: str) -> bool:
    """Whether a start that failed before its first rollout leaves a file of this name."""
    return (
        name in {".lock", "attempts", "logs", "resolved.toml"}
        or name.startswith(".writable.")
        or (name.startswith(".") and name.endswith(".tmp"))
    )


def config_problems(config: RunConfig) -> list[str]:
    """Everything that keeps ``config`` from running on any machine."""
    from ..config.checks.problems import problems
    from ..environments.registry import validate_environment
    from ..models.folder import read_model
    from ..run.errors import ConfigError

    found = problems(config)
    try:
        context = config.rollout.context_length or read_model(config.model.path).max_position_embeddings
    except ConfigError:
        return found  # already among them
    of_environment = validate_environment(config.environment, config.model.path, config.train.seed, context)
    # A file that is missing or broken was named once already, with its key.
    files = (config.environment.data, config.environment.heldout, config.model.path / "tokenizer.json")
    named = [str(file) for file in files if file and any(str(file) in problem for problem in found)]
    return found + [line for line in of_environment if not any(file in line for file in named)]


def _plan(config: RunConfig, found: Sequence[str]) -> Plan:
    """The processes of the run; ConfigError with ``found`` and what the machine lacks."""
    from ..launch.devices import visible_gpus
    from ..launch.placement import PlacementError, plan_local
    from ..run.errors import ConfigError

    try:
        plan = plan_local(config, gpus=visible_gpus())
    except PlacementError as error:
        raise ConfigError([*found, str(error)]) from None
    if found:
        raise ConfigError(found)
    return plan


def _describe(plan: Plan, directory: Path) -> str:
    """The processes of the run as a table."""
    rows = [("role", "rank", "host", "devices", "port", "log")]
    for process in plan.processes:
        port = {None: "-", 0: "any free"}.get(process.port, str(process.port))
        devices = f"gpu {','.join(process.devices)}" if process.devices else "cpu"
        rows.append((process.role, str(process.rank), process.host, devices, port, str(directory / process.log)))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]) for row in rows
    )
