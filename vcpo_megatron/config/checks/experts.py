"""Mixtures of experts: their split, the balance of their load, and the replay of the servers' routing."""

from __future__ import annotations

from collections.abc import Iterator

from ...models.shape import ModelShape
from ..schema import RunConfig


def expert_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
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
        if parallel.expert_dispatcher != "alltoall" and parallel.pipeline == 1:
            yield f'parallel.expert_dispatcher = "{parallel.expert_dispatcher}": {path} has no experts; remove it'
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
