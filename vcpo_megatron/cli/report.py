"""``vcpo report``: what a run did, by step or trajectory by trajectory, and what its evaluations got."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .common import DONE, FAILED, add_command, positive, refuse, say

#: Rows of a report, where it is not said how many.
_ROWS = 40


def add_report(commands: Any) -> None:
    """Add ``report`` to the commands of ``vcpo``."""
    parser = add_command(
        commands,
        "report",
        _report,
        help="say what a run did",
        description="Say what runs did, also while they go on: step by step what was trained, dropped and failed, and "
        "why, and accuracy, loss, rate, ESS, KL and times. With --step, --prompt, --trajectories, --text or --json, "
        "say what became of each trajectory: the step it was trained at, its staleness, weight and reward, or why it "
        "was not trained. With --eval, say what evaluations got, prompt by prompt. With --html, write one page of "
        "charts, samples and times of one run or several, which points at a collapse and what turned first.",
        example="vcpo report runs/first runs/second --html report.html",
    )
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="a run directory, or several")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page to FILE instead")
    parser.add_argument(
        "--rows",
        type=positive,
        metavar="N",
        help=f"rows of steps at most; a longer run has 2, 5, 10, 20, ... steps a row (default: {_ROWS})",
    )
    parser.add_argument("--step", type=int, metavar="N", help="the trajectories that step N consumed")
    parser.add_argument("--prompt", metavar="ID", help="the trajectories of this prompt")
    parser.add_argument(
        "--eval",
        action="store_true",
        help="the held-out prompts and their answers by the newest version that was evaluated; with --step N, by that "
        "of N steps, with --prompt ID, by every version",
    )
    parser.add_argument("--trajectories", "--data", action="store_true", help="the trajectories of the whole run")
    parser.add_argument("--text", action="store_true", help="their prompts and answers too, by the run's tokenizer")
    parser.add_argument("--json", action="store_true", help="one JSON object a trajectory, then one with the totals")


def _report(args: argparse.Namespace) -> int:
    one_by_one = (
        args.eval or args.trajectories or args.text or args.json or args.step is not None or args.prompt is not None
    )
    if args.html is not None and (one_by_one or args.rows is not None):
        return refuse(["--html shows whole runs; leave the options out that choose rows or trajectories"])
    if one_by_one and args.rows is not None:
        return refuse(["--rows bounds the rows of steps, and here trajectories are asked for; leave it out"])
    if args.html is not None:
        return _write_page(args.run_dirs, args.html)
    code = DONE
    for number, run_dir in enumerate(args.run_dirs):
        if len(args.run_dirs) > 1 and not args.json:
            print("\n" * bool(number), end="")
            say(f"{run_dir}:")
        code = max(code, _print_run(run_dir, args, one_by_one=one_by_one))
    return code


def _write_page(run_dirs: Sequence[Path], file: Path) -> int:
    from ..report.page import write_page
    from ..report.runs import opened
    from ..run.errors import ConfigError

    try:
        with opened(run_dirs) as runs:
            size = write_page(file, runs)
    except ConfigError as error:
        return refuse(error.problems, FAILED)
    say(f"{file}: {size / 1e6:.2f} MB")
    return DONE


def _print_run(run_dir: Path, args: argparse.Namespace, *, one_by_one: bool) -> int:
    from ..observability.sinks import read_rows
    from ..orchestrator.store.schema import StoreError
    from ..orchestrator.store.store import RolloutStore
    from ..report.heldout import print_evaluations
    from ..report.terminal import print_history, print_summary
    from ..report.transcript import Transcripts
    from ..run.directory import RunDirectory
    from ..run.errors import ConfigError

    directory = RunDirectory(run_dir)
    try:
        with RolloutStore.open_readonly(directory.store) as store:
            transcripts = Transcripts(store, directory) if args.text else None
            if args.eval:
                print_evaluations(
                    store, version=args.step, prompt_id=args.prompt, as_json=args.json, transcripts=transcripts
                )
            elif one_by_one:
                print_history(store, step=args.step, prompt_id=args.prompt, as_json=args.json, transcripts=transcripts)
            else:
                print_summary(store, read_rows(directory.metrics), most_rows=args.rows or _ROWS)
    except (StoreError, ConfigError) as error:
        return refuse([str(error)], FAILED)
    return DONE
