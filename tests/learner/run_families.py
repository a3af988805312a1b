"""Executed on every rank of a test world: logits and gathered weights of several models, one after another."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.learner.megatron import platform

from .families import prompts
from .world import leave_layout


def logits_each(cases: list[tuple[RunConfig, str | None]]) -> list[dict[str, Any]]:
    """For each (run, checkpoint or None: the HF folder): logits [T, V] of every prompt, all weights, used names."""
    platform.prepare()
    from vcpo_megatron.learner.checkpoint.logprobs import load_weights
    from vcpo_megatron.learner.megatron.model import build_model
    from vcpo_megatron.learner.megatron.parallel import initialize
    from vcpo_megatron.learner.weights.gather import WeightGatherer

    outcomes = []
    for config, checkpoint in cases:
        parallel = initialize(config)
        chunks, family, shape = build_model(config, parallel, load=checkpoint is None)
        if checkpoint is not None:
            load_weights(chunks, Path(checkpoint))
        for chunk in chunks:
            chunk.eval()
        logits = [_logits(chunks, prompt, parallel, shape.vocab_size) for prompt in prompts()]
        trainable: Any = SimpleNamespace(chunks=chunks, family=family, shape=shape)
        weights = {name: tensor.clone() for name, tensor in WeightGatherer(trainable, parallel).gather()}
        outcomes.append({"logits": logits, "weights": weights})
        leave_layout()
    return outcomes


def _logits(chunks: Any, prompt: torch.Tensor, parallel: Any, size: int) -> torch.Tensor:
    """float32 [T, V] on every rank, padding cut off."""
    from vcpo_megatron.learner.batch.packing import AttentionPlan, PackLayout
    from vcpo_megatron.learner.megatron.schedule import as_loss, forward_tokens, run_schedule

    found: list[torch.Tensor] = []

    def collect(output: torch.Tensor):  # noqa: ANN202
        parts = [torch.empty_like(output[0]) for _ in range(parallel.tensor_size)]
        dist.all_gather(parts, output[0].contiguous(), group=parallel.tensor_group)
        found.append(torch.cat(parts, dim=-1)[:, :size].contiguous())
        return as_loss(output.new_zeros(()))

    def forward(_: None, stage: Any):  # noqa: ANN202
        attention = AttentionPlan.of(PackLayout.of([len(prompt)], parallel.share), prompt.device)
        return forward_tokens(stage, prompt, torch.arange(len(prompt)), attention), collect

    with torch.no_grad():
        run_schedule(chunks, [None], forward, lengths=[len(prompt)], forward_only=True)
    whole = found[0] if found else torch.zeros(len(prompt), size)
    last = parallel.stage_global_rank(parallel.pipeline_size - 1)
    dist.broadcast(whole, last, group=parallel.pipeline_group)
    return whole


def logprobs_each(cases: list[tuple[RunConfig, str]], prompts: list[list[int]]) -> list[list[torch.Tensor]]:
    """For each (run, checkpoint): log-probs [L - 1] of every prompt."""
    platform.prepare()
    import numpy as np

    from vcpo_megatron.learner.checkpoint.logprobs import load_weights
    from vcpo_megatron.learner.megatron.model import build_model
    from vcpo_megatron.learner.megatron.parallel import initialize
    from vcpo_megatron.learner.weights.scoring import score_with

    outcomes = []
    for config, checkpoint in cases:
        parallel = initialize(config)
        chunks, _, shape = build_model(config, parallel, load=False)
        load_weights(chunks, Path(checkpoint))
        for chunk in chunks:
            chunk.eval()
        with torch.no_grad():
            scored = [score_with(chunks, shape.vocab_size, parallel, np.asarray(prompt)) for prompt in prompts]
        outcomes.append([torch.from_numpy(row) for row in scored])
        leave_layout()
    return outcomes
