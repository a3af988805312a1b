"""How a run goes on from its directory: the configuration stored there, what of it may change, whether all is done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..config.load import flatten, load_config, load_resolved, with_overrides
from ..config.schema import RunConfig
from ..observability.sinks import read_rows
from ..run.directory import RunDirectory
from ..run.errors import ConfigError
from .workspace import RunDirectoryError, chosen_checkpoint

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
    "launch": "address control_port grace_s learner_ranks master_port timeout_s",
    "observability": "tensorboard watchdog_s",
}
CHANGEABLE_ON_RESUME = frozenset(f"{section}.{key}" for section, keys in _CHANGEABLE.items() for key in keys.split())


def resumed_config(directory: RunDirectory, overrides: Sequence[str], from_step: int | None = None) -> RunConfig:
    """The stored configuration with ``overrides`` applied, for going on from the complete checkpoint ``from_step``, by
    default the newest one. ConfigError: there is no run, no such checkpoint, or a change does not go with resuming."""
    if not directory.resolved.is_file():
        what = "holds no run yet; start it without --resume" if directory.path.is_dir() else "is no run directory"
        raise ConfigError([f"--resume: {directory.path} {what} (there is no resolved.toml)"])
    stored = load_resolved(directory.resolved)
    config = with_overrides(stored, overrides)
    done = _steps_to_resume_from(directory, from_step)
    if refused := _refused_changes(directory, stored, config, with_checkpoint=done > 0):
        raise ConfigError(refused)
    if config.train.steps < done:
        raise ConfigError(
            [
                f"--resume: {done} steps are done already: train.steps = {config.train.steps} is less; raise "
                f"train.steps above {done}"
            ]
        )
    return config


def _refused_changes(
    directory: RunDirectory, stored: RunConfig, config: RunConfig, *, with_checkpoint: bool
) -> list[str]:
    before, after = flatten(stored), flatten(config)
    # The model may have moved: the learner compares what is there with the checkpoint's facts.
    allowed = CHANGEABLE_ON_RESUME | ({"model.path"} if with_checkpoint else set())
    return [
        f"{key} = {after[key]}: the run in {directory.path} has {before[key]}, and this cannot change on resume; "
        "leave it, or start a new run"
        for key in after
        if after[key] != before[key] and key not in allowed
    ]


def _steps_to_resume_from(directory: RunDirectory, wanted: int | None) -> int:
    """Step of the checkpoint that a resume goes back to, 0 where there was none; ConfigError when it is not there."""
    try:
        return chosen_checkpoint(directory, wanted) or 0
    except RunDirectoryError as error:
        raise ConfigError([str(error)]) from None


def ignored_changes(config: RunConfig, file: Path, overrides: Sequence[str]) -> list[str]:
    """ "KEY (run: VALUE, file: VALUE)" of every key in which ``file`` differs from ``config``, the run's."""
    used, given = flatten(config), flatten(load_config(file, overrides))
    return [f"{key} (run: {used[key]}, file: {given[key]})" for key in used if given[key] != used[key]]


def is_finished(directory: RunDirectory, config: RunConfig) -> bool:
    """Whether a resume has nothing to do: neither a step nor the evaluation of the last version is missing."""
    steps = config.train.steps
    if max(directory.complete_steps(), default=0) < steps:
        return False
    if config.train.eval_every == 0 or config.rollout.engine == "replay":
        return True
    rows = read_rows(directory.metrics)
    return not rows or rows[-1].get("eval/version") == steps
