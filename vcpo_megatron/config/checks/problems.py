"""What the sections of a configuration must satisfy together, and with the files they name.

Nothing is changed here, and nothing is started: every problem is a line that names key, value and
remedy, and all of them are returned together. Checks of this machine (free ports, a writable run
directory) belong to the launcher; those of an environment to the environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...models.folder import generation_problems, read_model, tokenizer_problems, weight_problems
from ...models.shape import ModelShape
from ...run.directory import RunDirectory
from ...run.errors import ConfigError
from ..load import read_toml
from ..methods import ORDERED_SURROGATES
from ..schema import RunConfig
from .engine_layers import engine_model_problems, engine_problems
from .idle_keys import idle_keys
from .servers import server_problems


def problems(config: RunConfig) -> list[str]:
    """Everything that keeps ``config`` from being run; empty when nothing does."""
    found = [
        *_parallel(config),
        *engine_problems(config),
        *_algorithm(config),
        *_generation(config),
        *_training(config),
        *idle_keys(config),
        *_rollout(config),
        *server_problems(config),
        *_sync(config),
        *_replay(config),
        *_files(config),
        *_ports(config),
    ]
    try:
        shape = read_model(config.model.path)
    except ConfigError as error:
        return found + error.problems
    found += _model_fits(config, shape)
    found += engine_model_problems(config, shape)
    for check in (weight_problems, tokenizer_problems, generation_problems):
        found += check(config.model.path, shape)
    return found


def _parallel(config: RunConfig) -> Iterator[str]:
    parallel, ranks = config.parallel, config.launch.learner_ranks
    replica = parallel.tensor * parallel.pipeline * parallel.context
    sizes = f"tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context} = {replica}"
    if ranks % replica:
        fits = max(1, ranks // replica) * replica
        yield f"launch.learner_ranks = {ranks}: not a multiple of {sizes}; {fits} would be"
    elif (replicas := config.data_parallel // config.expert_data_size) > config.train.groups_per_step:
        shared = f" / {config.expert_data_size} that share experts" if config.expert_data_size > 1 else ""
        yield (
            f"train.groups_per_step = {config.train.groups_per_step}: fewer than the {replicas} "
            f"data-parallel replicas ({ranks} ranks / {sizes}{shared}), some would have nothing to train on; "
            "raise it, or lower launch.learner_ranks"
        )
    yield from _combinations(config)
    if config.model.vocab_multiple % parallel.tensor:
        yield (
            f"model.vocab_multiple = {config.model.vocab_multiple}: not divisible by parallel.tensor = "
            f"{parallel.tensor}, so the padded vocabulary cannot be split"
        )


def _combinations(config: RunConfig) -> Iterator[str]:
    """Splits that need each other."""
    parallel = config.parallel
    if parallel.sequence_parallel and parallel.tensor == 1:
        yield "parallel.sequence_parallel = true: needs parallel.tensor of at least 2, whose ranks share the tokens"
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        yield (
            f"parallel.virtual_pipeline = {parallel.virtual_pipeline}: needs parallel.pipeline of at least 2; "
            "with one stage there is nothing to interleave"
        )
    if parallel.expert_dispatcher == "allgather" and parallel.pipeline > 1:
        yield (
            'parallel.expert_dispatcher = "allgather": needs packs of one length, which pipeline stages do not have; '
            'use "alltoall"'
        )
    stage = config.launch.learner_ranks // parallel.pipeline
    experts, dense = parallel.expert * parallel.expert_tensor, parallel.tensor * parallel.context
    if stage % experts:
        yield (
            f"parallel.expert = {parallel.expert}: expert x expert_tensor = {experts} does not divide the {stage} "
            "learner ranks of a pipeline stage"
        )
    elif parallel.expert > 1 and experts % dense and dense % experts:
        yield (
            f"parallel.expert = {parallel.expert}: expert x expert_tensor = {experts} and tensor x context = {dense} "
            "must divide one another, so that the ranks of a group's experts are those of its trajectories"
        )


def _routing_replay(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    if shape.experts is None:
        yield f"rollout.routing_replay = true: {config.model.path} has no experts; set it to false"
    elif shape.experts.sigmoid:
        yield (
            f"rollout.routing_replay = true: {config.model.path} routes by sigmoids and a bias, for which it is not "
            "tested; set it to false"
        )
    if config.rollout.engine == "replay":
        yield (
            'rollout.routing_replay = true: rollout.engine = "replay" has no record of experts, which are deleted once '
            "trained; set it to false"
        )


def _experts(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """The split of experts, and what exact per-trajectory gradients ask of it."""
    parallel, path, experts = config.parallel, config.model.path, shape.experts
    if config.rollout.routing_replay:
        yield from _routing_replay(config, shape)
    if (weight := config.algorithm.global_aux_loss) > 0:
        if experts is None or experts.sigmoid:
            yield f"algorithm.global_aux_loss = {weight}: {path} has no routers with a softmax; use 0"
        elif config.rollout.routing_replay:
            yield f"algorithm.global_aux_loss = {weight}: not tested with rollout.routing_replay = true; use 0"
    if experts is None:
        for name in ("expert", "expert_tensor"):
            if (value := getattr(parallel, name)) > 1:
                yield f"parallel.{name} = {value}: {path} has no experts; use 1"
        return
    if experts.count % parallel.expert:
        yield f"parallel.expert = {parallel.expert}: does not divide the {experts.count} experts of {path}"
    if experts.ffn_hidden_size % parallel.expert_tensor:
        yield (
            f"parallel.expert_tensor = {parallel.expert_tensor}: does not divide the {experts.ffn_hidden_size} units "
            f"of an expert of {path}"
        )
    if experts.shared_ffn_hidden_size % parallel.tensor:
        yield (
            f"parallel.tensor = {parallel.tensor}: does not divide the {experts.shared_ffn_hidden_size} units of the "
            f"shared expert of {path}"
        )
    if parallel.expert == 1 and parallel.expert_tensor != parallel.tensor:
        yield (
            f"parallel.expert_tensor = {parallel.expert_tensor}: must be parallel.tensor = {parallel.tensor} where "
            "parallel.expert = 1: Megatron would not sum what copies of an expert on tensor ranks find"
        )
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        yield (
            f"parallel.tensor = {parallel.tensor}: Megatron trains experts with tensor parallelism only with "
            "parallel.sequence_parallel = true; set it"
        )


def _algorithm(config: RunConfig) -> Iterator[str]:
    algorithm, staleness = config.algorithm, config.staleness
    row = algorithm.row
    if not row.corrected and staleness.max_staleness > 0 and not algorithm.allow_uncorrected:
        named = f'method = "{algorithm.method}"' if algorithm.is_level is None else 'is_level = "none"'
        yield (
            f"algorithm.{named}: with staleness.max_staleness = {staleness.max_staleness} off-policy data "
            "would be trained on without a correction; set is_level, max_staleness = 0, or allow_uncorrected = true"
        )
    if row.needs_norms and not row.linear:
        yield (
            f'algorithm.baseline = "{row.baseline}": the gradient of method = "{algorithm.method}" is not linear in '
            "the advantage, so no optimal baseline exists; use group_mean, leave_one_out or zero"
        )
    if not row.linear and algorithm.is_level not in (None, "none"):
        yield (
            f'algorithm.is_level = "{algorithm.is_level}": method = "{algorithm.method}" weighs ratios in its own '
            "way; remove is_level"
        )
    if row.ratio_low >= row.ratio_high:
        yield f"algorithm.ratio_low = {row.ratio_low}: must be below ratio_high = {row.ratio_high}"
    yield from _opob_mode(config)
    if (algorithm.kl_coef > 0) != (algorithm.kl_reference != "none"):
        yield (
            f'algorithm.kl_coef = {algorithm.kl_coef}: with kl_reference = "{algorithm.kl_reference}" it has no '
            "effect; set both or neither"
        )
    base = algorithm.base_ess_ratio
    if base == "auto":
        if staleness.lag == "exact":
            yield 'algorithm.base_ess_ratio = "auto": needs staleness.lag = "bounded"; give a number for "exact"'
    elif not 0 < base <= 1:
        yield f'algorithm.base_ess_ratio = {base}: must be "auto" or a number above 0 and at most 1'


def _generation(config: RunConfig) -> Iterator[str]:
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


def _opob_mode(config: RunConfig) -> Iterator[str]:
    algorithm, row, parallel = config.algorithm, config.algorithm.row, config.parallel
    if (row.statistic or row.surrogate in ORDERED_SURROGATES) and parallel.context > 1:
        yield (
            f'algorithm.method = "{algorithm.method}": needs a trajectory\'s tokens on one rank, which '
            f"parallel.context = {parallel.context} does not give; use context = 1"
        )
    if row.needs_norms and algorithm.opob_mode == "proxy" and parallel.expert > 1:
        yield (
            f'algorithm.opob_mode = "proxy": groups are spread over ranks with parallel.expert = {parallel.expert}, '
            'where no rank sees a whole one; use "accumulate", "deferred" or "two_pass"'
        )
    if row.needs_norms and algorithm.opob_mode == "proxy" and parallel.virtual_pipeline > 1:
        yield (
            f'algorithm.opob_mode = "proxy": its packs do not come in multiples of the {parallel.pipeline} stages that '
            f"parallel.virtual_pipeline = {parallel.virtual_pipeline} needs; use another mode or 1"
        )
    if row.baseline == "opob_leave_one_out" and algorithm.opob_mode == "accumulate":
        yield (
            'algorithm.baseline = "opob_leave_one_out": one sum a group cannot carry a baseline for each trajectory; '
            'use opob_mode = "deferred" or "two_pass"'
        )


def _training(config: RunConfig) -> Iterator[str]:
    train, optimizer = config.train, config.optimizer
    if train.group_size == 1:
        yield "train.group_size = 1: rewards of a group of one have no variance, nothing would be trained; at least 2"
    if optimizer.warmup_steps >= train.steps:
        yield (
            f"optimizer.warmup_steps = {optimizer.warmup_steps}: must be below train.steps = {train.steps}, "
            "the learning rate would never be reached"
        )
    if optimizer.lr * optimizer.weight_decay >= 1:
        yield (
            f"optimizer.weight_decay = {optimizer.weight_decay}: a step of optimizer.lr = {optimizer.lr} would take "
            f"more than a weight off it; below 1 / lr = {1 / optimizer.lr:g}"
        )
    if optimizer.min_lr > optimizer.lr:
        yield f"optimizer.min_lr = {optimizer.min_lr}: above optimizer.lr = {optimizer.lr}"
    if (optimizer.schedule == "wsd") != (optimizer.decay_steps is not None):
        yield f'optimizer.decay_steps = {optimizer.decay_steps}: belongs to schedule = "wsd", which needs it; set both'
    elif optimizer.decay_steps is not None and optimizer.warmup_steps + optimizer.decay_steps > train.steps:
        yield (
            f"optimizer.decay_steps = {optimizer.decay_steps}: with warmup_steps = {optimizer.warmup_steps} more than "
            f"train.steps = {train.steps}"
        )
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        yield f"optimizer.betas = {list(optimizer.betas)}: each must be at least 0 and below 1"


def _rollout(config: RunConfig) -> Iterator[str]:
    """A group keeps to one server, and the learner waits for its slowest member: it must run as a whole."""
    rollout, train = config.rollout, config.train
    has_servers = rollout.fleet_size > 0
    if has_servers and rollout.max_running_requests < train.group_size:
        yield (
            f"rollout.max_running_requests = {rollout.max_running_requests}: below train.group_size = "
            f"{train.group_size}, a group could not run as a whole on its server; at least {train.group_size}"
        )
    # Every group in flight needs a server: admitted at most (k + 1) groups_per_step at a time.
    in_flight = (config.staleness.max_staleness + 1) * train.groups_per_step
    if has_servers and rollout.fleet_size > in_flight:
        named = f"addresses = {list(rollout.addresses)}" if rollout.addresses else f"servers = {rollout.servers}"
        yield (
            f"rollout.{named}: at most (max_staleness + 1) x groups_per_step = {in_flight} "
            "groups are in flight, some servers would never get one; lower it"
        )
    if train.max_pack_tokens <= rollout.max_new_tokens:
        yield (
            f"train.max_pack_tokens = {train.max_pack_tokens}: a prompt and the "
            f"rollout.max_new_tokens = {rollout.max_new_tokens} of its answer would not fit one pack; raise it"
        )


def _sync(config: RunConfig) -> Iterator[str]:
    """How weights reach the servers."""
    rollout = config.rollout
    if rollout.sync == "tensor" and rollout.tensor_parallel > 1:
        yield (
            f'rollout.sync = "tensor": a server of tensor_parallel = {rollout.tensor_parallel} would need every bucket '
            'once for each of its ranks; use "distributed" or "disk"'
        )
    if rollout.fleet_size and rollout.sync_wave > rollout.fleet_size:
        yield f"rollout.sync_wave = {rollout.sync_wave}: there are {rollout.fleet_size} servers; lower it"


def _replay(config: RunConfig) -> Iterator[str]:
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
    for name in ("groups_per_step", "group_size"):
        value = recorded.get(name) if isinstance(recorded, dict) else None
        here = getattr(config.train, name)
        if value is not None and value != here:
            yield (
                f"train.{name} = {here}: the run recorded in {directory} has {value}, and its batches are trained on "
                f"as they are; set {value}"
            )


def _files(config: RunConfig) -> Iterator[str]:
    for name in ("data", "heldout"):
        path = getattr(config.environment, name)
        if path is not None and not path.is_file():
            yield f"environment.{name} = {path}: {'not a file' if path.exists() else 'no such file'}"


def _ports(config: RunConfig) -> Iterator[str]:
    """Ports given as numbers must differ; 0 means any free one."""
    launch, rollout = config.launch, config.rollout
    claims: dict[int, str] = {}
    wanted = [(launch.control_port, "launch.control_port"), (launch.master_port, "launch.master_port")]
    if rollout.port and rollout.started:
        last = rollout.port + rollout.servers - 1
        if last > 65535:
            yield f"rollout.port = {rollout.port}: with {rollout.servers} servers the last port would be {last}"
        wanted += [(rollout.port + rank, f"rollout.port (server {rank})") for rank in range(rollout.servers)]
    for port, name in wanted:
        if port and port in claims:
            yield f"{name} = {port}: the port is also that of {claims[port]}; give another, or 0 for any free one"
        claims.setdefault(port, name)


def _model_fits(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """The split of the model, and the lengths of trajectories, against the model's sizes."""
    parallel, path = config.parallel, config.model.path
    for name, size, what in (
        ("tensor", shape.num_attention_heads, "attention heads"),
        ("tensor", shape.num_key_value_heads, "key-value heads"),
        ("tensor", shape.ffn_hidden_size, "units of the MLP"),
        *(("tensor", rows, "rows of a latent projection") for rows in (shape.latent.cut_rows if shape.latent else ())),
        ("pipeline", shape.num_layers, "layers"),
    ):
        if size % (ways := getattr(parallel, name)):
            yield f"parallel.{name} = {ways}: does not divide the {size} {what} of {path}"
    stages = parallel.pipeline * parallel.virtual_pipeline
    if parallel.virtual_pipeline > 1 and shape.num_layers % stages:
        yield (
            f"parallel.virtual_pipeline = {parallel.virtual_pipeline}: pipeline x virtual_pipeline = {stages} does not "
            f"divide the {shape.num_layers} layers of {path}"
        )
    if config.model.vocab_multiple > shape.largest_vocab_multiple:
        yield (
            f"model.vocab_multiple = {config.model.vocab_multiple}: most of the vocabulary would be padding; give at "
            f"most {shape.largest_vocab_multiple} for {path}"
        )
    yield from _experts(config, shape)
    if config.rollout.verify_sync and config.rollout.engine == "sglang" and shape.latent is not None:
        yield (
            f"rollout.verify_sync = true: SGLang keeps the latent attention of {path} in another form than it is sent "
            "in, so its checksums cannot be foretold; set it to false"
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
