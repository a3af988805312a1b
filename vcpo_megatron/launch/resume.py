"""How a run goes on from its directory: the configuration stored there, what of it may change, whether all is done.

The copy in the run directory must hold what the run has recorded (``run.history``): who edits it by hand is told the
key. What may change is changed by ``--set``, so that it is checked, said and recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..config.load import flatten, load_config, load_resolved, with_overrides, written
from ..config.schema import RunConfig
from ..observability.sinks import read_rows
from ..run.directory import RunDirectory
from ..run.errors import ConfigError
from ..run.history import recorded
from .start import was_settled
from .workspace import RunDirectoryError, chosen_checkpoint


def _keys(table: dict[str, str]) -> frozenset[str]:
    return frozenset(f"{section}.{key}" for section, keys in table.items() for key in keys.split())


#: Keys that touch neither the policy nor what it is trained on.
_FREE = _keys(
    {
        "train": "eval_every max_pack_tokens steps",
        "rollout": (
            "addresses args bucket_bytes health_interval_s health_timeout_s max_failure_ratio max_prompt_failures "
            "max_restarts max_running_requests on_failure pause_mode port python request_timeout_s servers "
            "start_timeout_s sync sync_timeout_s sync_wave tensor_parallel verify_sync"
        ),
        "environment": "episode_timeout_s modules worker_memory_gb workers",
        "staleness": "adaptive adaptive_ess wait_s",
        "checkpoint": "every export_hf_every keep_best keep_last keep_rollouts resume_partial",
        "parallel": "context expert expert_dispatcher expert_tensor pipeline sequence_parallel tensor virtual_pipeline",
        "launch": "address control_port grace_s learner_ranks master_port timeout_s",
        "observability": "mismatch_warning tensorboard wandb_mode wandb_project watchdog_s",
    }
)
#: Keys of how the policy is trained from here on, whose change is sound with the rollouts that there are.
_OF_TRAINING = _keys({"optimizer": "clip_grad lr min_lr schedule_steps weight_decay", "staleness": "max_staleness"})
#: Keys that ``--resume --set`` may change.
CHANGEABLE_ON_RESUME = _FREE | _OF_TRAINING


def resumed_config(directory: RunDirectory, overrides: Sequence[str], from_step: int | None = None) -> RunConfig:
    """The stored configuration with ``overrides`` applied, for going on from the complete checkpoint ``from_step``, by
    default the newest one. ConfigError: there is no run, no such checkpoint, the stored one is not the run's, or a
    change does not go with resuming."""
    if not directory.resolved.is_file():
        what = "holds no run yet; start it without --resume" if directory.path.is_dir() else "is no run directory"
        raise ConfigError([f"--resume: {directory.path} {what} (there is no resolved.toml)"])
    stored = load_resolved(directory.resolved)
    step = _checkpoint_to_resume_from(directory, from_step)
    if edited := list(_edits(directory, stored, step)):
        raise ConfigError(edited)
    config = with_overrides(stored, overrides)
    if refused := list(_refused_changes(directory, stored, config, step)):
        raise ConfigError(refused)
    done = step or 0
    if config.train.steps < done:
        raise ConfigError(
            [
                f"--resume: {done} steps are done already: train.steps = {config.train.steps} is less; raise "
                f"train.steps above {done}"
            ]
        )
    return config


def _edits(directory: RunDirectory, stored: RunConfig, step: int | None) -> Iterator[str]:
    """A line for each key of the stored configuration that decides what is trained and is not the run's."""
    known, found = recorded(directory, step), written(stored)
    # The model may have moved: the learner compares what is there with the checkpoint's facts.
    free = _FREE | ({"model.path"} if step is not None else set())
    where = "its start" if step is None else f"step_{step}"
    for key in known.differing({key: value for key, value in found.items() if key not in free}):
        now, then = _shown(found[key]), _shown(known.values[key])
        change = f"--resume --set {key}={now}" if key in _OF_TRAINING else f"a new run, {_new_run(directory)}"
        yield (
            f"{key} = {now} in {directory.resolved}, which was edited: the run has {then} (as of {where}); put {then} "
            f"back; another value needs {change}"
        )


def _refused_changes(directory: RunDirectory, stored: RunConfig, config: RunConfig, step: int | None) -> Iterator[str]:
    before, after = flatten(stored), flatten(config)
    allowed = CHANGEABLE_ON_RESUME | ({"model.path"} if step is not None else set())
    exact = stored.staleness.lag == "exact"
    #: In exact lag the versions after this step would have sampled batches of the steps that are added.
    sampled = stored.train.steps - stored.staleness.max_staleness
    for key in after:
        if after[key] == before[key]:
            continue
        if key not in allowed:
            why = "this cannot change on resume"
        elif key == "train.steps" and exact and (step or 0) > sampled and after[key] > before[key]:
            why = (
                f'with lag = "exact" versions before step_{step} would have sampled for the steps that are added '
                f"(--from-step {max(sampled, 0)} or an earlier one can go on)"
            )
        elif key == "staleness.max_staleness" and exact:
            why = 'with lag = "exact" this cannot change on resume'
        elif key == "staleness.max_staleness" and after[key] < before[key]:
            why = "a resume may only raise this, since rollouts that there are may be so old"
        else:
            continue
        yield (
            f"{key} = {after[key]}: the run in {directory.path} has {before[key]}, and {why}; leave it, or start a new "
            f"run from its weights, {_new_run(directory)}"
        )


def _new_run(directory: RunDirectory) -> str:
    return f"--set train.start_from={directory.path}"


def _shown(value: str | None) -> str:
    return "not set" if value is None else value


def changes(directory: RunDirectory, config: RunConfig, from_step: int | None = None) -> list[str]:
    """ "KEY: OLD -> NEW" of every key in which ``config`` differs from the run's, by ``--set`` or because somebody has
    edited what is free in the stored one; ``from_step`` as in ``resumed_config``."""
    known = recorded(directory, _checkpoint_to_resume_from(directory, from_step)).values
    before, after = {**written(load_resolved(directory.resolved)), **known}, written(config)
    return [f"{key}: {_shown(before[key])} -> {_shown(after[key])}" for key in after if after[key] != before[key]]


def beyond_schedule(config: RunConfig) -> list[str]:
    """A line where steps are left that the schedule does not reach: it has its length from the start of the run."""
    chosen, steps = config.optimizer, config.train.steps
    if chosen.schedule == "constant" or chosen.schedule_steps is None or chosen.schedule_steps >= steps:
        return []
    return [
        f"the schedule ends with step {chosen.schedule_steps - 1} (optimizer.schedule_steps), and train.steps = "
        f"{steps}: later steps are taken at optimizer.min_lr = {chosen.min_lr:g}"
    ]


def _checkpoint_to_resume_from(directory: RunDirectory, wanted: int | None) -> int | None:
    """The checkpoint that a resume goes back to, None where there was none; ConfigError when it is not there."""
    try:
        return chosen_checkpoint(directory, wanted)
    except RunDirectoryError as error:
        raise ConfigError([str(error)]) from None


def ignored_changes(config: RunConfig, file: Path, overrides: Sequence[str]) -> list[str]:
    """ "KEY (run: VALUE, file: VALUE)" of every key in which ``file`` differs from ``config``, the run's."""
    used, given = flatten(config), flatten(load_config(file, overrides))
    return [
        f"{key} (run: {used[key]}, file: {given[key]})"
        for key in used
        if given[key] != used[key] and not was_settled(key, given[key], used[key])
    ]


def is_finished(directory: RunDirectory, config: RunConfig) -> bool:
    """Whether a resume has nothing to do: neither a step nor the evaluation of the last version is missing."""
    steps = config.train.steps
    if max(directory.complete_steps(), default=0) < steps:
        return False
    if config.train.eval_every == 0 or config.rollout.engine == "replay":
        return True
    rows = read_rows(directory.metrics)
    return not rows or rows[-1].get("eval/version") == steps
