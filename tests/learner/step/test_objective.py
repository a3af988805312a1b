"""Coefficients of tokens for every method preset: finite whatever a token's ratio is, and an anchor without weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from vcpo_megatron.config.methods import METHODS
from vcpo_megatron.config.schema import AlgorithmConfig
from vcpo_megatron.learner.batch.packing import Pack, Sample, Share, make_pack
from vcpo_megatron.learner.step.batch_state import BatchState, SampleNumbers
from vcpo_megatron.learner.step.objective import Objective

from ..batch.test_packing import trajectory, with_turns

FP32 = torch.finfo(torch.float32).max
#: One group: advantages above 0, of 0 and below 0.
REWARDS = (1.0, 0.5, 0.0)


def scene(
    algorithm: dict[str, Any], logs: list[list[float]], rewards: tuple[float, ...] = REWARDS, previous_ess: float = 1.0
) -> tuple[Objective, BatchState, Pack, torch.Tensor]:
    """A group of one trajectory for each list of token log ratios, as it is when its coefficients are asked for."""
    samples = []
    for i, (tokens, reward) in enumerate(zip(logs, rewards, strict=True)):
        one = trajectory(list(range(len(tokens) + 1)), 1, sample=i)
        behavior = np.array([0.0, *(-1.0 for _ in tokens)], np.float32)
        samples.append(Sample(i, 0, replace(one, reward=reward, behavior_logprobs=behavior)))
    config = AlgorithmConfig.model_validate({"baseline": "group_mean", **algorithm})
    pack, flat = make_pack(samples, Share(), torch.device("cpu")), [log for one in logs for log in one]
    objective, state = Objective(config), BatchState.of([samples], config, 16, previous_ess)
    ratios = torch.tensor(flat, dtype=torch.float64)
    state.log_ratio = torch.tensor([math.fsum(one) for one in logs], dtype=torch.float64)
    if objective.needs_statistic(state):
        state.statistic = objective.statistic(state, ratios)
    return objective, state, pack, (ratios - 1.0).float()


def known(state: BatchState, pack: Pack) -> tuple[SampleNumbers, torch.Tensor]:
    """Of the pack's samples: their numbers and log ratios."""
    return state.of_samples(pack.index), state.log_ratio[pack.index]


@pytest.mark.parametrize("size", [3e-12, 4e-13, 1e-30, 1e30])
def test_trajectories_of_one_reward_share_a_ratio_whatever_its_size(size: float) -> None:
    """Rewards size and 0: R - m is half of it and that is what multiplies the sum of q W, exactly."""
    keys = {"method": "vcpo", "baseline": "group_mean", "normalize_std": False}
    objective, state, pack, _ = scene(keys, [[0.3], [1.0], [-2.0], [0.1]], (size, 0.0, 0.0, size))
    state.has_variance[:] = True  # a difference of 1e-30 counts as none, here as any other
    numbers, log_ratio = known(state, pack)
    found = objective.coefficients(state, pack.index, numbers, log_ratio)
    assert found.classes == ((0, 3), (1, 2)) and found.ratios is not None
    assert found.ratios.tolist() == pytest.approx([0.5 * size, -0.5 * size], rel=1e-15, abs=0)
    assert (found.gradient / found.sums).tolist() == pytest.approx(found.ratios[[0, 1, 1, 0]].tolist(), rel=1e-14)


#: Keys beside the preset's own.
GIVEN: tuple[dict[str, Any], ...] = (
    {},
    {"is_threshold": math.inf},
    {"ratio_high": math.inf},
    {"baseline": "zero"},
    {"is_level": "turn", "is_threshold": math.inf},
)


@pytest.mark.parametrize("method", METHODS)
def test_one_token_far_away_costs_its_own_coefficient_only(method: str) -> None:
    for given in GIVEN:
        for far in (30.0, 100.0, 710.0, 1e4):
            _check_far_away(method, given, far)


def _check_far_away(method: str, given: dict[str, Any], far: float) -> None:
    """Log ratios of +far and -far meet advantages above, of and below 0: no coefficient is infinite in fp32, or nan.

    The two cancel in the ratio of the whole answer, so that a sequence's weight is 1.
    """
    objective, state, pack, policy = scene({"method": method, **given}, [[0.0, far, -far]] * 3)
    found = objective.token_coefficients(state, pack, policy, *known(state, pack))
    assert found.dtype is torch.float32 and bool(found.isfinite().all())
    assert float(found.abs().max()) < math.sqrt(FP32)  # and its square, in a norm
    advantage = objective.advantages(state.of_samples(pack.index))
    if not METHODS[method].whole_batch:
        assert found.view(3, 3)[advantage == 0.0].eq(0.0).all()
    # a token at a ratio of 1 is what it was, wherever its neighbours are, but where a method looks at all of them
    if not METHODS[method].statistic and method not in ("mu_grpo", "tis_veto"):
        _, state, pack, policy = scene({"method": method, **given}, [[0.0, 0.0, 0.0]] * 3)
        near = objective.token_coefficients(state, pack, policy, *known(state, pack))
        assert found.view(3, 3)[:, 0].tolist() == near.view(3, 3)[:, 0].tolist()


def turns_of(pack: Pack, ends: list[tuple[int, ...]]) -> list[Sample]:
    """The pack's samples with turns that end at these of their tokens."""
    return [replace(s, trajectory=with_turns(s.trajectory, *e)) for s, e in zip(pack.samples, ends, strict=True)]


def test_a_turn_has_one_weight_by_its_own_tokens() -> None:
    """Answers of 3 and 2 tokens in turns of 1 and 2, and of 2 tokens; those of the second turn are bounded by 8."""
    logs = [[math.log(0.5), 1.0, 2.0], [math.log(2.0), math.log(3.0)]]
    objective, _, pack, policy = scene({"is_level": "turn"}, logs, (1.0, 0.0))
    pack = make_pack(turns_of(pack, [(2, 4), (3,)]), Share(multiple=8), torch.device("cpu"))
    policy = torch.cat([policy.double(), torch.full((3,), math.nan).double()])  # padding
    assert objective.token_weights(pack, policy)[:5].tolist() == pytest.approx([0.5, 8.0, 8.0, 6.0, 6.0], rel=1e-6)
    # log 8 grows by sqrt(2) for turns of two tokens
    grown, *_ = scene({"is_level": "turn", "is_threshold_length": 1}, logs, (1.0, 0.0))
    found = grown.token_weights(pack, policy)[:5]
    assert found.tolist() == pytest.approx([0.5, *[8.0 ** math.sqrt(2)] * 2, 6.0, 6.0], rel=1e-6)
    assert 8.0 ** math.sqrt(2) < math.exp(3)
    whole, *_ = scene({"is_level": "turn", "is_threshold": math.inf}, logs, (1.0, 0.0))
    assert whole.token_weights(pack, policy)[1] == pytest.approx(math.exp(3), rel=1e-6)


def test_a_turn_that_context_ranks_share_has_the_weight_of_all_its_tokens() -> None:
    """Two ranks, each with a part of the first turn's tokens: log ratios 1, 2 | -.5, -.5 and the second turn's. The
    first part alone would be truncated."""
    logs = [1.0, 2.0, -0.5, -0.5, 0.125, 0.125]
    _, _, pack, _ = scene({}, [logs], (1.0,))
    samples = turns_of(pack, [(5, 7)])
    sums: list[torch.Tensor] = []

    def weigh(rank: int, total: torch.Tensor | None) -> list[float]:
        part = make_pack(samples, Share(rank, 2), torch.device("cpu"))
        policy = part.behavior_logprobs + torch.tensor([*logs, 0.0, 0.0])[[[0, 1, 6, 7], [2, 3, 4, 5]][rank]]
        objective = Objective(
            AlgorithmConfig.model_validate({"is_level": "turn"}),
            lambda own: (sums.append(own), own if total is None else total)[1],
        )
        return objective.token_weights(part, policy.double()).tolist()

    apart = [weigh(rank, None) for rank in (0, 1)]
    total = sums[0] + sums[1]
    assert total.tolist() == pytest.approx([2.0, 0.25])
    first, second = math.exp(2.0), math.exp(0.25)
    assert weigh(0, total) == pytest.approx([first, first, 1.0, 1.0])
    assert weigh(1, total) == pytest.approx([first, first, second, second])
    assert apart[0][0] == pytest.approx(8.0)  # what a rank would take for the weight alone


@pytest.mark.parametrize("level", ["sequence", "turn", "token"])
def test_an_advantage_of_0_is_0_under_a_weight_without_bound(level: str) -> None:
    keys = {"method": "tis_sequence", "is_level": level, "is_threshold": math.inf}
    objective, state, pack, policy = scene(keys, [[800.0], [800.0], [-800.0]])
    assert objective.trajectory_coefficients(*known(state, pack))[1] == 0.0
    assert objective.token_coefficients(state, pack, policy, *known(state, pack))[1:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("method", ["tis_token", "icepop", "tis_sequence", "mis", "reinforce", "grpo", "cispo", "gspo"])
def test_no_weight_multiplies_the_anchor(method: str) -> None:
    """Log ratio -6: the policy has left the token, whose weight is exp(-6) or 0; the anchor pulls all the same."""
    logs = [[-6.0, 0.1], [-6.0, 0.1], [5.0, -6.0]]
    keys = {"method": method, "behavior_anchor": 0.5}
    without, state, pack, policy = scene({"method": method}, logs)
    anchored, other, _, _ = scene(keys, logs, previous_ess=0.2)
    assert other.anchor == pytest.approx(0.4)
    policy = policy.double()
    pull = anchored.token_coefficients(other, pack, policy, *known(other, pack))
    pull = pull - without.token_coefficients(state, pack, policy, *known(state, pack))
    assert pull.tolist() == pytest.approx([0.4] * 6)
    # nothing pulls in a zero-variance group
    flat, state, pack, policy = scene(keys, logs, (1.0, 1.0, 1.0), previous_ess=0.2)
    assert flat.token_coefficients(state, pack, policy, *known(state, pack)).tolist() == [0.0] * 6


def test_where_the_anchor_is_a_term_of_its_own() -> None:
    """One coefficient a trajectory multiplies gradients that hold the tokens' weights: the anchor is not in it."""
    logs = [[-1.0], [0.5], [0.0]]
    for level, own in (("token", True), ("turn", True), ("sequence", False), ("none", False)):
        objective, state, pack, policy = scene(
            {"method": "tis_token", "is_level": level, "behavior_anchor": 0.5}, logs, previous_ess=0.5
        )
        assert objective.has_token_anchor(state) is own
        numbers, log_ratio = known(state, pack)
        plain = objective.sequence_weights(log_ratio, numbers.threshold_growth) * objective.advantages(numbers)
        rest = objective.trajectory_coefficients(numbers, log_ratio) - plain
        assert rest.tolist() == pytest.approx([0.0 if own else 0.25] * 3)
        assert objective.token_anchor(numbers, pack, policy).tolist() == [0.25] * 3
        # r W is not made of q W where the anchor is a part of r, and the weight may vanish beside it
        assert (objective.coefficients(state, pack.index, numbers, log_ratio).classes is None) is not own
    on_policy = scene({"method": "tis_token", "behavior_anchor": 0.5}, logs)
    assert not on_policy[0].has_token_anchor(on_policy[1])  # and no pass for it


def test_with_a_record_tokens_carry_the_mismatch_and_the_weight_is_the_lags() -> None:
    """log mu = -1. The learner recorded -1 + ln 2 and -1 - ln 2; since then it moved by the log ratios given."""
    objective, state, pack, policy = scene(
        {"mismatch": "recorded", "behavior_anchor": 0.5}, [[0.1, 0.2], [0.3, 0.0], [-0.2, 0.0]], previous_ess=0.5
    )
    jumps = torch.tensor([math.log(2.0), -math.log(2.0)] * 3)
    pack = replace(pack, recorded_logprobs=pack.behavior_logprobs + jumps)
    policy = (policy + jumps).double()
    assert objective.log_ratios(pack, policy).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.0, -0.2, 0.0], abs=1e-6)
    assert objective.token_weights(pack, policy).tolist() == pytest.approx([2.0, 0.5] * 3)
    numbers, log_ratio = known(state, pack)
    weights = objective.sequence_weights(log_ratio, numbers.threshold_growth)
    assert weights.tolist() == pytest.approx([math.exp(0.3), math.exp(0.3), math.exp(-0.2)])
    # the anchor pulls on tokens as they are, by a term of its own
    assert objective.has_token_anchor(state)
    per_token = (weights * objective.advantages(numbers)).repeat_interleave(2) * torch.tensor([2.0, 0.5] * 3)
    found = objective.token_coefficients(state, pack, policy, numbers, log_ratio)
    assert found.tolist() == pytest.approx((per_token + 0.25).tolist())


def test_answers_that_the_learner_finds_impossible_vanish_whatever_their_lag() -> None:
    objective, state, _, _ = scene({"mismatch": "recorded"}, [[0.0, 0.0]] * 3)
    state.weight_sum = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
    assert objective.mean_weight(state) == pytest.approx(0.5)
    state.weight_sum.zero_()
    assert objective.mean_weight(state) == 0.0
