"""The command ``vcpo``: parse first, import what a command needs after.

Exit codes: 0 done, 1 failed, 2 bad usage or configuration; 129, 130 and 143 stopped by SIGHUP, SIGINT and SIGTERM, 138
by SIGUSR1 or --max-hours, after a checkpoint; 141 the reader of its output went away.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .common import DONE, FAILED, INTERRUPTED, PIPE_CLOSED, add_command, positive, refuse

#: Of a report, where it is not said how many.
_ROWS = 40


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
        return refuse([f"{error.filename or 'standard output'}: {error.strerror}"])


def _drop_output() -> None:
    """What standard output still holds cannot be written; the interpreter must not try again at its end."""
    with contextlib.suppress(OSError, ValueError):  # a stand-in without a descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    from .. import __version__
    from .convert import add_convert
    from .train import add_train

    parser = argparse.ArgumentParser(
        prog="vcpo",
        description="Asynchronous reinforcement learning of language models on Megatron-core, with VCPO.",
        epilog="example: vcpo train examples/modular_sum_cpu/run.toml",
    )
    parser.add_argument("--version", action="version", version=f"vcpo {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_train(commands)
    _add_serve(commands)
    add_convert(commands)
    _add_doctor(commands)
    _add_report(commands)
    return parser


def _add_serve(commands: Any) -> None:
    parser = add_command(
        commands,
        "serve",
        _serve,
        help="serve a model over HTTP with the embedded engine",
        description="Serve a Hugging Face model folder over HTTP with the embedded engine, until a signal.",
        example="vcpo serve examples/modular_sum_cpu/model --port 30000",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="Hugging Face folder")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=30000, help="0: any free one (default: %(default)s)")


def _add_doctor(commands: Any) -> None:
    parser = add_command(
        commands,
        "doctor",
        _doctor,
        help="say what is installed, what it enables and what is missing",
        description="Say what is installed, what it enables and what is missing; with --config, check a run as well.",
        example="vcpo doctor --config examples/modular_sum_cpu/run.toml",
    )
    parser.add_argument("--config", type=Path, metavar="RUN.toml", help="check this configuration too")


def _add_report(commands: Any) -> None:
    parser = add_command(
        commands,
        "report",
        _report,
        help="say what a run did",
        description="Say what a run did, also while it goes on: step by step what was trained, dropped and failed, and "
        "why. With --step, --prompt, --trajectories, --text or --json, say what became of each trajectory: the step it "
        "was trained at, its staleness, weight and reward, or why it was not trained.",
        example="vcpo report runs/first --step 12 --text",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run directory")
    parser.add_argument(
        "--rows",
        type=positive,
        metavar="N",
        help=f"rows of steps at most; a longer run has 2, 5, 10, 20, ... steps a row (default: {_ROWS})",
    )
    parser.add_argument("--step", type=int, metavar="N", help="the trajectories that step N consumed")
    parser.add_argument("--prompt", metavar="ID", help="the trajectories of this prompt")
    parser.add_argument("--trajectories", "--data", action="store_true", help="the trajectories of the whole run")
    parser.add_argument("--text", action="store_true", help="their prompts and answers too, by the run's tokenizer")
    parser.add_argument("--json", action="store_true", help="one JSON object a trajectory, then one with the totals")


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; give 0 to 65535")
    return int(text)


# --- serve, doctor ----------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    from ..models.folder import read_model, tokenizer_problems, weight_problems
    from ..run.errors import ConfigError

    try:
        shape = read_model(args.model)
    except ConfigError as error:
        return refuse(error.problems)
    if found := weight_problems(args.model, shape) + tokenizer_problems(args.model, shape):
        return refuse(found)

    from ..rollout.embedded.server import serve

    return serve(["--model-path", str(args.model), "--host", args.host, "--port", str(args.port)])


def _doctor(args: argparse.Namespace) -> int:
    from ..planning.doctor import Finding, examine, render

    config, problems = None, list[str]()
    if args.config is not None:
        from ..config.load import load_config
        from ..run.errors import ConfigError
        from .train import config_problems

        try:
            config = load_config(args.config)
            problems = config_problems(config)
        except ConfigError as error:
            problems = error.problems
    findings = examine(Path("runs"), config.rollout.python if config else None)
    if args.config is not None:
        findings += [Finding("wrong", "config", problem) for problem in problems]
        if not problems:
            findings.append(Finding("ok", "config", f"{args.config} can run"))
    print(render(findings))
    return FAILED if any(finding.level in ("missing", "wrong") for finding in findings) else DONE


# --- report -----------------------------------------------------------------------------------


def _report(args: argparse.Namespace) -> int:
    from ..orchestrator.store.schema import StoreError
    from ..orchestrator.store.store import RolloutStore
    from ..report.terminal import print_history, print_summary
    from ..report.transcript import Transcripts
    from ..run.directory import RunDirectory
    from ..run.errors import ConfigError

    directory = RunDirectory(args.run_dir)
    one_by_one = args.trajectories or args.text or args.json or args.step is not None or args.prompt is not None
    if one_by_one and args.rows is not None:
        return refuse(["--rows bounds the rows of steps, and here trajectories are asked for; leave it out"])
    try:
        with RolloutStore.open_readonly(directory.store) as store:
            if one_by_one:
                transcripts = Transcripts(store, directory) if args.text else None
                print_history(store, step=args.step, prompt_id=args.prompt, as_json=args.json, transcripts=transcripts)
            else:
                print_summary(store, most_rows=args.rows or _ROWS)
    except (StoreError, ConfigError) as error:
        return refuse([str(error)], FAILED)
    return DONE
