"""``vcpo train``: settle configuration and run directory, report every problem at once, then start.

A resumed run goes on with the configuration that its directory holds; ``--set`` may change what touches neither the
policy nor what it is trained on.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import DONE, add_command, add_overrides, note, refuse

if TYPE_CHECKING:
    from ..config.schema import RunConfig
    from ..launch.placement import Plan
    from ..run.directory import RunDirectory


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
    parser.add_argument(
        "config",
        type=Path,
        nargs="?",
        metavar="RUN.toml",
        help="the configuration; --resume needs none where --run-dir says which run",
    )
    add_overrides(parser)
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


def _train(args: argparse.Namespace) -> int:
    from ..config.checks.start import start_checkpoint
    from ..config.load import dump_resolved
    from ..launch import resume
    from ..planning.decisions import decisions
    from ..run.errors import ConfigError
    from ..run.output import surviving

    try:
        directory, config, notes = _resumed(args) if args.resume else _fresh(args)
        plan = _plan(directory, config, resume=args.resume, dry_run=args.dry_run)
    except ConfigError as error:
        return refuse(error.problems)
    with surviving():
        for text in notes:
            note(text)
    if args.resume and args.from_step is None and resume.is_finished(directory, config):
        print(
            f"{directory.path}: already finished: all {config.train.steps} steps are done; to go on, raise "
            "train.steps (--set train.steps=N)"
        )
        return DONE
    if args.dry_run:
        print(dump_resolved(config))
        print(plan.table(directory.path))
        if config.train.start_from is not None and not args.resume:
            print(f"starts from the weights of {start_checkpoint(config.train.start_from)}")
        print()
        print(decisions(config))
        return DONE

    from ..launch import local

    return local.run(config, directory, local.LaunchOptions(args.resume, args.from_step, args.max_hours))


def _fresh(args: argparse.Namespace) -> tuple[RunDirectory, RunConfig, list[str]]:
    from ..config.load import load_config
    from ..config.precision import with_dtype
    from ..launch.workspace import new_run_directory
    from ..run.directory import RunDirectory
    from ..run.errors import ConfigError

    if args.from_step is not None:
        raise ConfigError(["--from-step: only with --resume"])
    if args.config is None:
        raise ConfigError(["RUN.toml: missing; give the configuration, as in vcpo train RUN.toml"])
    config = with_dtype(load_config(args.config, args.overrides))
    return RunDirectory(args.run_dir or new_run_directory(args.config)), config, []


def _resumed(args: argparse.Namespace) -> tuple[RunDirectory, RunConfig, list[str]]:
    from ..launch.resume import beyond_schedule, changes, ignored_changes, resumed_config
    from ..launch.workspace import newest_run_directory
    from ..run.directory import RunDirectory
    from ..run.errors import ConfigError

    if args.run_dir is None and args.config is None:
        raise ConfigError(["--resume: which run? give its directory with --run-dir, or the RUN.toml of the newest one"])
    directory = RunDirectory(args.run_dir or newest_run_directory(args.config))
    config = resumed_config(directory, args.overrides, args.from_step)
    ignored = ignored_changes(config, args.config, args.overrides) if args.config else []
    text = f"resuming with {directory.resolved}; {args.config} differs in {', '.join(ignored)}: not used"
    changed = [f"the resume changes {change}" for change in changes(directory, config, args.from_step)]
    return directory, config, [*([text] if ignored else []), *changed, *beyond_schedule(config)]


def _plan(directory: RunDirectory, config: RunConfig, *, resume: bool, dry_run: bool) -> Plan:
    """The processes of the run; ConfigError with everything that is in the way of a start. A dry run plays an episode
    of the environment and tries the ports, too."""
    from ..launch.devices import visible_gpus
    from ..launch.placement import PlacementError, plan_local
    from ..launch.workspace import run_directory_problems
    from ..orchestrator.modes.environment_check import Examination
    from ..orchestrator.store.schema import StoreError, refuse_missing
    from ..planning.preflight import NOTHING_PLAYED, config_problems, port_problems
    from ..run.errors import ConfigError

    begins = not (resume and directory.complete_steps())
    if not begins:
        try:
            refuse_missing(directory.store)
        except StoreError as error:
            raise ConfigError([str(error)]) from None
    examination = Examination(1, note=note) if dry_run else NOTHING_PLAYED
    found = [
        *run_directory_problems(directory, resume=resume),
        *config_problems(config, examination, begins=begins),
    ]
    try:
        plan = plan_local(config, gpus=visible_gpus())
    except PlacementError as error:
        raise ConfigError([*found, str(error)]) from None
    found += port_problems(plan) if dry_run else []
    if found:
        raise ConfigError(found)
    return plan
