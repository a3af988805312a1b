"""The command ``vcpo``: parse first, import what a command needs after.

Exit codes: 0 done, 1 failed, 2 bad usage or configuration; 129, 130 and 143 stopped by SIGHUP, SIGINT and SIGTERM, 138
by SIGUSR1 or --max-hours, after a checkpoint; 141 the reader of its output went away.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config.models import RunConfig
    from .launch.placement import Plan

DONE, FAILED, BAD_USAGE, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141

#: Keys that a resumed run may change: they touch neither the policy nor what it is trained on.
CHANGEABLE_ON_RESUME = frozenset(
    "train.steps train.eval_every train.max_pack_tokens rollout.servers rollout.port rollout.max_running_requests "
    "rollout.pause_mode rollout.max_restarts rollout.request_timeout_s rollout.start_timeout_s "
    "rollout.sync_timeout_s rollout.on_failure rollout.max_prompt_failures rollout.max_failure_ratio staleness.wait_s "
    "staleness.adaptive staleness.adaptive_ess checkpoint.every checkpoint.keep_last checkpoint.keep_best "
    "checkpoint.keep_rollouts checkpoint.resume_partial parallel.tensor parallel.pipeline parallel.virtual_pipeline "
    "parallel.context parallel.expert parallel.expert_tensor parallel.expert_dispatcher parallel.sequence_parallel "
    "launch.learner_ranks launch.master_port launch.control_port launch.timeout_s observability.tensorboard "
    "observability.watchdog_s".split()
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    try:
        try:
            args = _parser().parse_args(argv)
            return args.command(args)
        finally:
            sys.stdout.flush()  # here, where a full disk or a reader that went away can still be said
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return PIPE_CLOSED
    except OSError as error:
        _drop_output()
        return _refuse([f"{error.filename or 'standard output'}: {error.strerror}"])


def _drop_output() -> None:
    """What standard output still holds cannot be written; the interpreter must not try again at its end."""
    with contextlib.suppress(OSError, ValueError):  # a stand-in without a descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vcpo",
        description="Asynchronous reinforcement learning of language models on Megatron-core, with VCPO.",
        epilog="example: vcpo train examples/modular_sum_cpu/run.toml",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_train(commands)
    _add_serve(commands)
    _add_convert(commands)
    _add_doctor(commands)
    _add_report(commands)
    return parser


def _add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model",
        description="Train a model as a configuration file says.",
        epilog="example: vcpo train examples/modular_sum_cpu/run.toml --set train.steps=40 --run-dir runs/first",
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
    parser.set_defaults(command=_train)


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP with the embedded engine",
        description="Serve a Hugging Face model folder over HTTP with the embedded engine, until a signal.",
        epilog="example: vcpo serve examples/modular_sum_cpu/model --port 30000",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="Hugging Face folder")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=30000, help="0: any free one (default: %(default)s)")
    parser.set_defaults(command=_serve)


def _add_convert(commands: Any) -> None:
    from .cli_convert import add_convert

    add_convert(commands)


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what is installed, what it enables and what is missing",
        description="Say what is installed, what it enables and what is missing; with --config, check a run as well.",
        epilog="example: vcpo doctor --config examples/modular_sum_cpu/run.toml",
    )
    parser.add_argument("--config", type=Path, metavar="RUN.toml", help="check this configuration too")
    parser.set_defaults(command=_doctor)


def _add_report(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="say what a run did",
        description="Say what became of every trajectory of a run that has ended: the step it was trained at, its "
        "staleness, weight and reward, or why it was not trained.",
        epilog="example: vcpo report runs/first --data --step 12",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run directory")
    parser.add_argument("--data", action="store_true", required=True, help="one line a trajectory, of rollouts.sqlite")
    parser.add_argument("--step", type=int, metavar="N", help="only what step N consumed")
    parser.add_argument("--prompt", metavar="ID", help="only this prompt")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, then one with the totals")
    parser.set_defaults(command=_report)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; give 0 to 65535")
    return int(text)


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = 0.0
    if not 0 < hours < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give a number of hours above 0, as in 23.5")
    return hours


# --- train ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """What ``train`` settled on before anything is started."""

    config: RunConfig
    directory: Path
    notes: tuple[str, ...] = ()


def _train(args: argparse.Namespace) -> int:
    from .config.load import ConfigError, dump_resolved

    try:
        if args.from_step is not None and not args.resume:
            raise ConfigError(["--from-step: only with --resume"])
        run = _resumed_run(args) if args.resume else _fresh_run(args)
        plan = _plan(run.config, [*_run_directory_problems(run, args.resume), *_problems(run.config)])
    except ConfigError as error:
        return _refuse(error.problems)
    for note in run.notes:
        print(f"vcpo: {note}", file=sys.stderr)
    if args.resume and args.from_step is None and _is_finished(run):
        print(f"{run.directory}: already finished: all {run.config.train.steps} steps are done; to go on, raise "
              "train.steps (--set train.steps=N)")  # fmt: skip
        return DONE
    if args.dry_run:
        print(dump_resolved(run.config))
        print(_describe(plan, run.directory))
        return DONE

    from .config.run_directory import RunDirectory
    from .launch import local

    options = local.Options(args.resume, args.from_step, args.max_hours)
    return local.run(run.config, RunDirectory(run.directory), options)


def _fresh_run(args: argparse.Namespace) -> _Run:
    from .config.load import load_config

    return _Run(load_config(args.config, args.overrides), args.run_dir or _new_run_directory(args.config))


def _resumed_run(args: argparse.Namespace) -> _Run:
    """The stored configuration with ``--set`` applied; ConfigError when a change does not go with resuming."""
    from .config.load import ConfigError, flatten, load_config, load_resolved, with_overrides
    from .config.run_directory import RunDirectory

    directory = args.run_dir or _newest_run_directory(args.config)
    resolved = RunDirectory(directory).resolved
    if not resolved.is_file():
        what = "holds no run yet; start it without --resume" if directory.is_dir() else "is no run directory"
        raise ConfigError([f"--resume: {directory} {what} (there is no resolved.toml)"])
    stored = load_resolved(resolved)
    config = with_overrides(stored, args.overrides)
    before, after = flatten(stored), flatten(config)
    refused = [
        f"{key} = {after[key]}: the run in {directory} has {before[key]}, and this cannot change on resume; "
        "leave it, or start a new run"
        for key in after
        if after[key] != before[key] and key not in CHANGEABLE_ON_RESUME
    ]
    if refused:
        raise ConfigError(refused)
    done = _steps_done(directory) if args.from_step is None else args.from_step
    if config.train.steps < done:
        raise ConfigError([
            f"--resume: {done} steps are done already: train.steps = {config.train.steps} is less; raise train.steps "
            f"above {done}"
        ])  # fmt: skip
    given = flatten(load_config(args.config, args.overrides))
    differing = [f"{key} (run: {after[key]}, file: {given[key]})" for key in after if given[key] != after[key]]
    note = f"resuming with {resolved}; {args.config} differs in {', '.join(differing)}: not used"
    return _Run(config, directory, (note,) if differing else ())


def _steps_done(directory: Path) -> int:
    """Steps that the checkpoint has behind it from which the run in ``directory`` goes on."""
    from .config.run_directory import RunDirectory

    return max(RunDirectory(directory).complete_steps(), default=0)


def _is_finished(run: _Run) -> bool:
    """Whether a resume has nothing to do: neither a step nor the evaluation of the last version is missing."""
    from .config.run_directory import RunDirectory
    from .observability.sinks import read_rows

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
    from .config.load import ConfigError

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
    return name in {".lock", "attempts", "logs", "resolved.toml"} or name.startswith(".writable.") or (
        name.startswith(".") and name.endswith(".tmp")
    )  # fmt: skip


def _problems(config: RunConfig) -> list[str]:
    """Everything that keeps ``config`` from running on any machine."""
    from .config.checks import problems
    from .config.load import ConfigError
    from .config.model_folder import read_model
    from .environments.registry import validate_environment

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
    from .config.load import ConfigError
    from .launch.devices import visible_gpus
    from .launch.placement import PlacementError, plan_local

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
    return "\n".join("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]])
                     for row in rows)  # fmt: skip


def _refuse(problems: Sequence[str]) -> int:
    from .config.process import ERROR_PREFIX

    for problem in problems:
        print(ERROR_PREFIX + " ".join(problem.split()), file=sys.stderr)
    return BAD_USAGE


# --- serve, doctor ----------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    from .config.load import ConfigError
    from .config.model_folder import read_model, tokenizer_problems, weight_problems

    try:
        shape = read_model(args.model)
    except ConfigError as error:
        return _refuse(error.problems)
    if found := weight_problems(args.model, shape) + tokenizer_problems(args.model, shape):
        return _refuse(found)

    from .rollout.embedded.server import serve

    return serve(["--model-path", str(args.model), "--host", args.host, "--port", str(args.port)])


def _doctor(args: argparse.Namespace) -> int:
    from .planning.doctor import Finding, examine, render

    findings = examine(Path("runs"))
    if args.config is not None:
        from .config.load import ConfigError, load_config

        try:
            problems = _problems(load_config(args.config))
        except ConfigError as error:
            problems = error.problems
        findings += [Finding("missing", "config", problem) for problem in problems]
        if not problems:
            findings.append(Finding("ok", "config", f"{args.config} can run"))
    print(render(findings))
    return FAILED if any(finding.level == "missing" for finding in findings) else DONE


# --- report -----------------------------------------------------------------------------------


def _report(args: argparse.Namespace) -> int:
    from .config.process import ERROR_PREFIX
    from .config.run_directory import RunDirectory
    from .orchestrator.history import print_history
    from .orchestrator.store import RolloutStore, StoreError

    try:
        with RolloutStore.open_readonly(RunDirectory(args.run_dir).store) as store:
            print_history(store, step=args.step, prompt_id=args.prompt, as_json=args.json)
    except StoreError as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
        return FAILED
    return DONE
