"""Rollouts: how many run at once, their lengths, weight synchronisation, and replays of recorded ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...models.shape import ModelShape
from ...run.directory import RunDirectory
from ...run.errors import ConfigError
from ..load import read_toml
from ..schema import RunConfig


def generation_problems(config: RunConfig) -> Iterator[str]:
    """Policies that decide what is sampled need a run that decides it as it goes."""
    if config.rollout.engine == "replay":
        why = 'rollout.engine = "replay" trains on what was recorded'
    elif config.staleness.lag == "exact":
        why = 'staleness.lag = "exact" fixes its batches before they are sampled'
    else:
        return
    if config.train.drop_zero_variance:
        yield f"train.drop_zero_variance = true: {why}; set it to false"
    if config.staleness.adaptive:
        yield f"staleness.adaptive = true: {why}; set it to false"
    if config.rollout.on_failure == "resample":
        yield f'rollout.on_failure = "resample": {why}; set it to "drop"'


def episode_problems(config: RunConfig) -> Iterator[str]:
    """A hanging episode is a failure of its prompt only if it is counted before its group is given up."""
    limit, wait = config.environment.episode_timeout_s, config.staleness.wait_s
    given_up = config.staleness.lag == "bounded" and config.rollout.engine != "replay"
    if given_up and limit is not None and limit >= wait:
        yield (
            f"environment.episode_timeout_s = {limit:g}: not below staleness.wait_s = {wait:g}, so an episode that "
            "hangs would be dropped as expired and sampled again, not counted as failed; lower it, or raise "
            "staleness.wait_s"
        )


def rollout_problems(config: RunConfig) -> Iterator[str]:
    """A group keeps to one server, and the learner waits for its slowest member: it must run as a whole."""
    rollout, train = config.rollout, config.train
    has_servers = rollout.fleet_size > 0
    if has_servers and rollout.max_running_requests < train.group_size:
        yield (
            f"rollout.max_running_requests = {rollout.max_running_requests}: below train.group_size = "
            f"{train.group_size}, a group could not run as a whole on its server; at least {train.group_size}"
        )
    # Every group in flight needs a server: admitted at most those of k + 1 steps at a time.
    in_flight = (config.staleness.max_staleness + 1) * train.groups_per_update
    if has_servers and rollout.fleet_size > in_flight:
        named = f"addresses = {list(rollout.addresses)}" if rollout.addresses else f"servers = {rollout.servers}"
        yield (
            f"rollout.{named}: at most (max_staleness + 1) x {_groups_of_a_step(config)} = {in_flight} "
            "groups are in flight, some servers would never get one; lower it"
        )
    if train.max_pack_tokens <= rollout.max_new_tokens:
        yield (
            f"train.max_pack_tokens = {train.max_pack_tokens}: a prompt and the "
            f"rollout.max_new_tokens = {rollout.max_new_tokens} of its answer would not fit one pack; raise it"
        )


def _groups_of_a_step(config: RunConfig) -> str:
    updates = config.train.updates_per_batch
    return "groups_per_step" if updates == 1 else "groups_per_step / updates_per_batch"


def update_problems(config: RunConfig) -> Iterator[str]:
    """A batch that is split into several updates: what has to be whole batches, and the lag of the later ones."""
    train, staleness, updates = config.train, config.staleness, config.train.updates_per_batch
    if updates == 1:
        return
    named = f"train.updates_per_batch = {updates}"
    if train.groups_per_step % updates:
        yield f"{named}: does not divide train.groups_per_step = {train.groups_per_step}, whose groups stay whole"
    for key in ("steps", "eval_every"):
        if (value := getattr(train, key)) % updates:
            nearest = -(-value // updates) * updates
            yield (
                f"train.{key} = {value}: counted in optimizer steps, of which {named} make a batch and its weights; "
                f"give a multiple, as {nearest}"
            )
    if staleness.lag == "exact" and config.rollout.engine != "replay":
        yield (
            f'{named}: staleness.lag = "exact" publishes every version, and trains each step on what one of them '
            "sampled; use 1"
        )
    elif staleness.max_staleness < updates - 1 and config.rollout.engine != "replay":
        yield (
            f"staleness.max_staleness = {staleness.max_staleness}: the last update of a batch is at least "
            f"{updates - 1} versions from the one that sampled it ({named}); at least {updates - 1}"
        )
    if config.algorithm.preset.surrogate == "decoupled_ppo":
        yield (
            f"{named}: the proximal policy of decoupled PPO is that of the batch's first update, whose log-probs the "
            "later ones do not have; use 1"
        )
    if config.algorithm.base_ess_ratio == "auto":
        yield (
            f'algorithm.base_ess_ratio = "auto": measured over first steps without lag, which {named} does not give; '
            "give a number"
        )


def weight_sync_problems(config: RunConfig) -> Iterator[str]:
    """How weights reach the servers."""
    rollout = config.rollout
    if rollout.sync == "tensor" and rollout.tensor_parallel > 1:
        yield (
            f'rollout.sync = "tensor": a server of tensor_parallel = {rollout.tensor_parallel} would need every bucket '
            'once for each of its ranks; use "distributed" or "disk"'
        )
    if rollout.fleet_size and rollout.sync_wave > rollout.fleet_size:
        yield f"rollout.sync_wave = {rollout.sync_wave}: there are {rollout.fleet_size} servers; lower it"


def replay_problems(config: RunConfig) -> Iterator[str]:
    """The run directory whose rollouts are trained on again."""
    rollout = config.rollout
    if rollout.engine == "replay" and rollout.replay is None:
        yield 'rollout.engine = "replay": needs rollout.replay, the run directory whose rollouts are trained on again'
    if rollout.replay is None:
        return
    if rollout.engine != "replay":
        yield f'rollout.replay = {rollout.replay}: only used with rollout.engine = "replay"; set that or remove it'
    elif not rollout.replay.is_dir():
        yield f"rollout.replay = {rollout.replay}: no such folder"
    elif not (rollout.replay / "rollouts.sqlite").is_file():
        yield f"rollout.replay = {rollout.replay}: has no rollouts.sqlite, so it is no run directory"
    else:
        yield from _recorded_batches(config, rollout.replay)


def _recorded_batches(config: RunConfig, directory: Path) -> Iterator[str]:
    """A replay takes the recorded batches as they are, so both runs must give them one shape."""
    path = RunDirectory(directory).resolved
    if not path.is_file():
        return  # the orchestrator compares with the rollouts themselves
    try:
        recorded = read_toml(path).get("train")
    except ConfigError as error:
        yield from error.problems
        return
    for name in ("groups_per_step", "updates_per_batch", "group_size"):
        value = recorded.get(name) if isinstance(recorded, dict) else None
        here = getattr(config.train, name)
        if value is not None and value != here:
            yield (
                f"train.{name} = {here}: the run recorded in {directory} has {value}, and its batches are trained on "
                f"as they are; set {value}"
            )


def model_rollout_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """What rollouts need of the model: room for prompt and answer, and checksums that can be computed."""
    path = config.model.path
    if config.rollout.verify_sync and config.rollout.engine == "sglang" and shape.latent is not None:
        yield (
            f"rollout.verify_sync = true: SGLang keeps the latent attention of {path} in another form than it is sent "
            "in, so its checksums cannot be computed here; set it to false"
        )
    wanted = config.rollout.context_length
    if wanted is not None and wanted > shape.max_position_embeddings:
        yield (
            f"rollout.context_length = {wanted}: exceeds the {shape.max_position_embeddings} positions of {path} "
            "(max_position_embeddings); lower it"
        )
    elif wanted is not None and config.rollout.max_new_tokens >= wanted:
        yield (
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens}: leaves no room for a prompt within "
            f"rollout.context_length = {wanted}; lower it or raise rollout.context_length"
        )
    elif config.rollout.max_new_tokens >= shape.max_position_embeddings:
        yield (
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens}: leaves no room for a prompt in the "
            f"{shape.max_position_embeddings} positions of {path} (max_position_embeddings); lower it"
        )
