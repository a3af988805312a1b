"""``vcpo env check``: plays episodes of a run's environment with a stand-in of the policy, and shows them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import BAD_USAGE, DONE, FAILED, add_command, add_overrides, note, positive, refuse, say

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ..orchestrator.modes.environment_check import PlayedEpisode


def add_env(commands: Any) -> None:
    """Add ``env`` and its action to the parser of ``vcpo``."""
    parser = commands.add_parser(
        "env",
        help="try a run's environment without a model or a server",
        description="Try a run's environment without a model or a server.",
        epilog="example: vcpo env check examples/dataset_cpu/run.toml --episodes 4",
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    check = add_command(
        actions,
        "check",
        _check,
        help="play episodes and show them",
        description="Make the environment of a configuration, play training and held-out prompts with a stand-in that "
        "answers with random tokens, and with the reference answer where the environment has one, and show what was "
        "asked, answered, observed and rewarded. Exit code 0: all episodes came to their end; 1: some failed; 2: the "
        "environment cannot be used.",
        example="vcpo env check examples/dataset_cpu/run.toml --episodes 4",
    )
    check.add_argument("config", type=Path, metavar="RUN.toml", help="the configuration")
    add_overrides(check)
    check.add_argument(
        "--episodes",
        type=positive,
        default=2,
        metavar="N",
        help="training prompts, and held-out prompts, that are played (default: %(default)s of each)",
    )


def _check(args: argparse.Namespace) -> int:
    from ..config.load import load_config
    from ..models.tokenizer import TokenizerError, load_tokenizer
    from ..orchestrator.modes.environment_check import Examination
    from ..planning.preflight import config_problems
    from ..run.errors import ConfigError

    played: list[PlayedEpisode] = []

    def show(episode: PlayedEpisode) -> None:
        played.append(episode)
        for line in _lines(episode, tokenizer):
            say(line)

    try:
        config = load_config(args.config, args.overrides)
        tokenizer = load_tokenizer(config.model.path / "tokenizer.json")
        problems = config_problems(config, Examination(args.episodes, show, note))
    except ConfigError as error:
        return refuse(error.problems)
    except TokenizerError as error:
        return refuse([str(error)])
    if problems:
        return refuse(problems, FAILED if any(episode.failure for episode in played) else BAD_USAGE)
    say(f"environment {config.environment.name}: {len(played)} episodes were played, all came to their end")
    return DONE


def _lines(episode: PlayedEpisode, tokenizer: Tokenizer) -> Iterator[str]:
    """An episode for a terminal, as ``vcpo report --text`` shows a trajectory."""
    from ..report.transcript import lines_of

    counts = ", ".join(f"{of} {len(ids)}" for of, ids, _ in episode.pieces()) or "none"
    yield f"{episode.prompt.prompt_id}, answered with {episode.policy}; tokens: {counts}"
    pieces = [
        {"of": of, "text": tokenizer.decode(list(ids), skip_special_tokens=False)}
        | ({} if reason is None else {"finish_reason": reason})
        for of, ids, reason in episode.pieces()
    ]
    yield from lines_of({"text": pieces})
    if episode.failure is not None:
        yield f"    {'failed:':<18}{episode.failure}"
        return
    info = "".join(f"  {name} {value:g}" for name, value in episode.info.items())
    yield f"    {'reward:':<18}{episode.reward:g}{info}"
