"""What bounds a step, from a batch's numbers, and what is remembered of it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vcpo_megatron.config.schema import AlgorithmConfig, RunConfig
from vcpo_megatron.learner.step.step_size import EssState, StepBounds, behavior_entropy, step_bounds
from vcpo_megatron.types import Batch, Group

from ..batch.test_packing import trajectory
from .test_batch_state import state_of

#: -log mu: 1 + 2 of the first answer, 2 of the second
BATCH = Batch(0, (Group(0, "p", (trajectory([5, 6, 7], 1), trajectory([5, 6, 7], 2, sample=1))),))
LOG_RATIO = torch.tensor([math.log(2), -math.log(2)], dtype=torch.float64)


def config(clip_grad: float = 1.0, **algorithm: Any) -> RunConfig:
    data: dict[str, Any] = {"model": {"path": Path("/m")}, "train": {"steps": 1}, "environment": {"name": "none"}}
    return RunConfig.model_validate({**data, "algorithm": algorithm, "optimizer": {"clip_grad": clip_grad}})


def taken(state: EssState, bounds: StepBounds, norm: float) -> EssState:
    """After a step within ``bounds`` on a gradient of this norm."""
    return state.taken(0.5, state_of((1.0, 0.0)), AlgorithmConfig(), bounds, norm)


def test_the_entropy_of_the_behaviour_is_of_a_whole_answer_and_of_sampled_tokens_alone() -> None:
    assert behavior_entropy(BATCH) == 2.5
    masked = [
        dataclasses.replace(t, behavior_logprobs=np.where(t.loss_mask, t.behavior_logprobs, -9).astype(np.float32))
        for t in BATCH.groups[0].trajectories
    ]
    assert behavior_entropy(Batch(0, (Group(0, "p", tuple(masked)),))) == 2.5


def test_the_papers_method_has_no_bound_and_remembers_none() -> None:
    state = EssState()
    bounds = step_bounds(state, config(), BATCH, LOG_RATIO)
    assert bounds == StepBounds(kl=bounds.kl, entropy=bounds.entropy) and bounds.scale == 1.0 and bounds.metrics == {}
    assert bounds.largest_norm is None  # the optimizer's own
    state = taken(state, bounds, 2.0)
    assert state == EssState(previous_ratio=0.5, first_ratios=[0.5])


def test_a_bounded_step_and_the_next() -> None:
    state, run = EssState(), config(method="vcpo_plus")
    bounds = step_bounds(state, run, BATCH, LOG_RATIO)
    assert bounds.metrics == pytest.approx(
        {"bound/lr_scale": 0.02, "bound/kl": 0.25, "bound/entropy": 2.5, "bound/grad_norm": 1.0}
    )
    state = taken(state, bounds, 0.2)
    assert state.bound.kl == pytest.approx(0.25) and state.mean_square == pytest.approx(0.04)
    after = step_bounds(state, run, BATCH, LOG_RATIO)
    assert after.scale == pytest.approx(0.03) and after.largest_norm == pytest.approx(0.6)


def test_without_a_bound_of_the_optimizer_the_first_gradient_is_not_limited() -> None:
    bounds = step_bounds(EssState(), config(clip_grad=0.0, spike_clip=3.0), BATCH, LOG_RATIO)
    assert bounds.largest_norm == math.inf and bounds.metrics == {}


def test_it_is_read_from_a_checkpoint_as_it_was() -> None:
    state = EssState()
    for norm in (0.2, 0.7):
        state = taken(state, step_bounds(state, config(method="vcpo_plus"), BATCH, LOG_RATIO), norm)
    assert EssState(**json.loads(json.dumps(dataclasses.asdict(state)))) == state
    assert EssState(previous_ratio=0.5, first_ratios=[0.5]).bound.met is False  # of a checkpoint that has none
