"""How the learner is split over its ranks: tensor, pipeline, context and data parallelism, and the model's sizes."""

from __future__ import annotations

from collections.abc import Iterator

from ...models.shape import ModelShape
from ..schema import RunConfig


def parallel_problems(config: RunConfig) -> Iterator[str]:
    """Of the configuration alone."""
    parallel, ranks = config.parallel, config.launch.learner_ranks
    replica = parallel.tensor * parallel.pipeline * parallel.context
    sizes = f"tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context} = {replica}"
    if ranks % replica:
        fits = max(1, ranks // replica) * replica
        yield f"launch.learner_ranks = {ranks}: not a multiple of {sizes}; {fits} would be"
    elif (replicas := config.data_parallel // config.expert_data_size) > config.train.groups_per_update:
        updates = config.train.updates_per_batch
        split = f" / updates_per_batch = {updates}" if updates > 1 else ""
        shared = f" / {config.expert_data_size} that share experts" if config.expert_data_size > 1 else ""
        yield (
            f"train.groups_per_step = {config.train.groups_per_step}{split}: fewer than the {replicas} "
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


def split_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """What the split needs of the model's sizes."""
    parallel, path = config.parallel, config.model.path
    for name, size, what in (
        ("tensor", shape.num_attention_heads, "attention heads"),
        ("tensor", shape.num_key_value_heads, "key-value heads"),
        ("tensor", shape.ffn_hidden_size, "units of the MLP"),
        *(("tensor", rows, "rows of a latent projection") for rows in (shape.latent.cut_rows if shape.latent else ())),
        ("pipeline", shape.num_layers, "layers"),
    ):
        if size % (parts := getattr(parallel, name)):
            yield f"parallel.{name} = {parts}: does not divide the {size} {what} of {path}"
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
