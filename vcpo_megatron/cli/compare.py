"""``vcpo compare``: methods, lags, rates and seeds through whole runs in exact lag; tables of what they got."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import DONE, FAILED, add_command, lost_output, note, positive, refuse, say

if TYPE_CHECKING:
    import subprocess

    from ..comparison.matrix import PlannedRun
    from ..config.schema import RunConfig


def add_compare(commands: Any) -> None:
    """Add ``compare`` to the commands of ``vcpo``."""
    parser = add_command(
        commands,
        "compare",
        _compare,
        help="compare methods, lags, rates and seeds by whole runs",
        description="Run every method at every lag, rate and seed of a SPEC.toml, each in exact lag and by the whole "
        "product, as many side by side as the machine has room for, and print tables of what they got. Results are "
        "added to OUT/results.jsonl; the same command later runs what is missing, and takes up what was stopped. "
        "Ctrl-C stops all runs with a checkpoint. With --report, tables of what is there; with --variance, what other "
        "baselines would have given in runs that are done.",
        example="vcpo compare examples/compare_methods/quick.toml --jobs 1",
    )
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="SPEC.toml; with --report, files of results, folders that hold one, or a SPEC.toml; with --variance, run "
        "directories",
    )
    parser.add_argument("--out", type=Path, metavar="OUT", help="folder of the comparison (default: runs/compare-NAME)")
    parser.add_argument(
        "--jobs", type=positive, metavar="N", help="runs side by side (default: as many as there are cores or GPUs for)"
    )
    parser.add_argument(
        "--figures", type=Path, metavar="DIR", help="with --report: write SVG pictures, too (a comparison: OUT/figures)"
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--dry-run", action="store_true", help="check every run and list them, start nothing")
    mode.add_argument("--report", action="store_true", help="tables of the results that there are, in Markdown")
    mode.add_argument(
        "--variance",
        action="store_true",
        help="second moment of the gradient estimator under several baselines, from the norms of recorded runs",
    )


def _compare(args: argparse.Namespace) -> int:
    from ..run.errors import ConfigError

    try:
        if (args.report or args.variance) and (args.out or args.jobs):
            raise ConfigError(["--out and --jobs are for running; leave them out"])
        if args.figures and not args.report:
            raise ConfigError(["--figures belongs to --report; leave it out, or add that"])
        if args.report:
            return _report(args.paths, args.figures)
        if args.variance:
            return _variance(args.paths)
        if len(args.paths) > 1:
            raise ConfigError([f"{args.paths[1]}: one SPEC.toml at a time; with --report or --variance several paths"])
        return _run(args.paths[0], args)
    except ConfigError as error:
        return refuse(error.problems)


def _run(path: Path, args: argparse.Namespace) -> int:
    from ..comparison.figures import write_figures
    from ..comparison.matrix import default_folder, planned_runs, problems_of
    from ..comparison.results import appended, newest, read_records
    from ..comparison.runner import Comparison
    from ..comparison.spec import load_spec
    from ..comparison.tables import finished, report
    from ..launch.supervision import caught_signals, no_orphans
    from ..run.errors import ConfigError
    from ..run.output import surviving

    spec = load_spec(path)
    runs = planned_runs(spec)
    if problems := problems_of(runs, _examined):
        raise ConfigError(problems)
    folder: Path = args.out or default_folder(path)
    slots = _slots(runs, args.jobs)
    if args.dry_run:
        for run in runs:
            say(run.label)
        say(f"{len(runs)} runs of {spec.steps} steps, {len(slots)} side by side; results: {folder}/results.jsonl")
        return DONE
    with surviving(lost_output), appended(folder / "results.jsonl") as results:
        known = newest(read_records([folder]))
        with caught_signals() as signals, no_orphans():
            outcome = Comparison(
                runs,
                folder,
                results,
                known,
                name=spec.name,
                slots=slots,
                processes=_Processes(),
                signals=signals,
                say=_line,
            ).run()
        records, digests = read_records([folder]), {run.digest for run in runs}
        text = report(records, digests, target=spec.target)
        (folder / "report.md").write_text(text, encoding="utf-8")
        write_figures(finished(records, digests), folder / "figures", target=spec.target)
        say("")
        for line in text.splitlines():
            say(line)
        note(f"these tables are in {folder}/report.md, pictures in {folder}/figures")
        if outcome.stopped:
            note(f"stopped: {outcome.done + outcome.before} of {len(runs)} runs are done; the same command goes on")
            return 128 + signals[0]
    return FAILED if outcome.failed else DONE


def _line(text: str) -> None:
    say(text)
    sys.stdout.flush()  # also into a file: somebody may follow it


def _examined(config: RunConfig, whole: bool) -> Sequence[str]:
    """What ``vcpo train --dry-run`` would refuse; ``whole``: after an episode of the environment."""
    from ..config.checks.problems import problems
    from ..launch.devices import visible_gpus
    from ..launch.placement import PlacementError, plan_local
    from ..orchestrator.modes.environment_check import Examination
    from ..planning.preflight import config_problems

    found = config_problems(config, Examination(1, note=note)) if whole else problems(config)
    try:
        plan_local(config, gpus=visible_gpus())
    except PlacementError as error:
        found = [*found, str(error)]
    return found


def _slots(runs: Sequence[PlannedRun], jobs: int | None) -> list[dict[str, str]]:
    """Variables of each run that is made beside others: its own GPUs, where runs take any.

    By default there are as many as cores for the learner ranks and servers of the largest run, at least one.
    """
    from ..launch.devices import visible_gpus
    from ..launch.placement import plan_local
    from ..run.errors import ConfigError

    gpus = visible_gpus()
    plans = [plan_local(run.config, gpus=gpus) for run in runs]
    taken = max(len({device for process in plan.processes for device in process.devices}) for plan in plans)
    busy = max(len(plan.learners) + len(plan.servers) for plan in plans)
    room = len(gpus) // taken if taken else max(1, len(os.sched_getaffinity(0)) // busy)
    if jobs is not None and taken and jobs > room:
        raise ConfigError([f"--jobs {jobs}: a run takes {taken} of {len(gpus)} GPUs; {room} at most"])
    parts = [gpus[slot * taken : (slot + 1) * taken] for slot in range(jobs or room)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(part)} if part else {} for part in parts]


class _Processes:
    """``comparison.runner.Processes`` by those of the product."""

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        from ..transport.child import start_child

        return start_child(command, env=env, log=log)

    def ask(self, child: subprocess.Popen[bytes]) -> None:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)

    def kill(self, child: subprocess.Popen[bytes]) -> None:
        from ..transport.child import stop_child

        stop_child(child, grace_s=0.0)

    def error(self, log: Path) -> str | None:
        from ..transport.child import last_error

        return last_error(log)


def _report(paths: Sequence[Path], figures: Path | None) -> int:
    from ..comparison.figures import write_figures
    from ..comparison.matrix import default_folder, planned_runs
    from ..comparison.results import read_records
    from ..comparison.spec import load_spec
    from ..comparison.tables import finished, report

    places, digests, targets = [], set[str](), set[float]()
    for path in paths:
        if path.suffix == ".toml":
            spec = load_spec(path)
            digests |= {run.digest for run in planned_runs(spec)}
            targets.add(spec.target)
            places.append(default_folder(path))
        else:
            places.append(path)
    records, target = read_records(places), min(targets, default=0.9)
    for line in report(records, digests or None, target=target).splitlines():
        say(line)
    if figures is not None:
        write_figures(finished(records, digests or None), figures, target=target)
    return DONE


def _variance(paths: Sequence[Path]) -> int:
    from ..comparison.variance import study

    for line in study(paths).splitlines():
        say(line)
    return DONE
