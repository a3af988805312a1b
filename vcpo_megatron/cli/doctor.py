"""``vcpo doctor``: what is installed, what it enables and what is missing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import DONE, FAILED, add_command, note

if TYPE_CHECKING:
    from ..config.schema import RunConfig


def add_doctor(commands: Any) -> None:
    """Add ``doctor`` to the commands of ``vcpo``."""
    parser = add_command(
        commands,
        "doctor",
        _doctor,
        help="say what is installed, what it enables and what is missing",
        description="Say what is installed, what it enables and what is missing; with --config, check a run as well.",
        example="vcpo doctor --config examples/modular_sum_cpu/run.toml",
    )
    parser.add_argument("--config", type=Path, metavar="RUN.toml", help="check this configuration too")


def _doctor(args: argparse.Namespace) -> int:
    from ..planning.doctor import Finding, examine, render

    config, problems, warnings = None, list[str](), list[str]()
    if args.config is not None:
        from ..config.load import load_config
        from ..run.errors import ConfigError

        try:
            config = load_config(args.config)
            problems = _problems(config)
        except ConfigError as error:
            problems = error.problems
    findings = examine(Path("runs"), config.rollout.python if config else None)
    if args.config is not None:
        findings += [Finding("wrong", "config", problem) for problem in problems]
        findings += [Finding("note", "config", warning) for warning in warnings]
        if not problems:
            findings.append(Finding("ok", "config", f"{args.config} can run"))
    print(render(findings))
    return FAILED if any(finding.level in ("missing", "wrong") for finding in findings) else DONE


def _problems(config: RunConfig) -> list[str]:
    """What keeps ``config`` from running; an episode of its environment is played. Where this machine has room for the
    run, its ports are tried as well."""
    from ..launch.devices import visible_gpus
    from ..launch.placement import PlacementError, plan_local
    from ..orchestrator.modes.environment_check import Examination
    from ..planning.preflight import config_problems, port_problems

    found = config_problems(config, Examination(1, note=note))
    try:
        return found + port_problems(plan_local(config, gpus=visible_gpus()))
    except PlacementError:
        return found
