"""OPOB against literal answers, its invariances, and a brute-force search with per-sample gradients."""

from __future__ import annotations

import math

import pytest
import torch

from vcpo_megatron.algorithm.baselines import (
    before_norms,
    from_norms,
    group_mean,
    leave_one_out,
    leave_one_out_opob,
    opob,
    zero,
)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_known_answer_counts_the_weight_once():
    weights, norms, rewards = tensor(1, 2), tensor(1, 1), tensor(1, 0)
    # (1^2 1 + 2^2 0) / (1^2 + 2^2)
    assert opob(weights.log(), norms.log(), rewards).value == pytest.approx(0.2, rel=1e-15)
    # The reference measures the norm of the weighted gradient and weighs it again: w^4, wrong.
    assert opob(weights.log(), (weights * norms).log(), rewards).value == pytest.approx(1 / 17, rel=1e-14)


def test_norms_enter_squared():
    # (3^2 2 + 1^2 5 + 2^2 -1) / 14
    baseline = opob(tensor(0, 0, 0), tensor(3, 1, 2).log(), tensor(2, 5, -1))
    assert baseline.value == pytest.approx(19 / 14, rel=1e-15)
    assert not baseline.fell_back


@pytest.mark.parametrize(("norm_scale", "weight_scale"), [(1e-6, 1e-4), (1e9, 1e-30), (1e-150, 1e-150)])
def test_scale_of_norms_and_weights_is_irrelevant(norm_scale, weight_scale):
    norms, weights, rewards = tensor(0.3, 2.0, 0.7, 1.1), tensor(1.5, 0.1, 4.0, 1.0), tensor(1, 0, 1, 0)
    plain = opob(weights.log(), norms.log(), rewards).value
    scaled = opob((weights * weight_scale).log(), (norms * norm_scale).log(), rewards).value
    # An epsilon of 1e-8 in the denominator gives 0.07 instead of 1 in such cases.
    assert scaled == pytest.approx(plain, rel=1e-12)


@pytest.mark.parametrize("reward", [1.0, 0.0, 0.1, -7.3, 1e20])
def test_equal_rewards_give_that_reward_to_the_last_bit(reward):
    generator = torch.Generator().manual_seed(3)
    log_u, log_norm = torch.randn(2, 7, generator=generator, dtype=torch.float64) * 50
    rewards = torch.full((7,), reward, dtype=torch.float64)
    assert opob(log_u, log_norm, rewards).value == reward
    assert leave_one_out_opob(log_u, log_norm, rewards).values.tolist() == [reward] * 7
    assert group_mean(rewards).value == reward
    assert opob(log_u, torch.full((7,), -math.inf), rewards).value == reward


def test_extreme_log_ratios():
    # The heaviest trajectory decides; float32 weights would be inf, their squares nan.
    assert opob(tensor(2000, -2000, 0), tensor(0, 0, 0), tensor(0.75, 0, 1)).value == 0.75
    assert opob(tensor(-2000, -2000, -2000.5), tensor(0, 0, 0.5), tensor(1, 0, 0)).value == pytest.approx(1 / 3)


def test_float32_input_is_computed_in_double():
    log_u = torch.tensor([0.1, 0.2, 0.3])
    expected = opob(log_u.double(), torch.zeros(3).double(), tensor(1, 0, 1)).value
    assert opob(log_u, torch.zeros(3), torch.tensor([1.0, 0.0, 1.0])).value == expected


def test_zero_norms_take_no_part():
    baseline = opob(tensor(0, 5, 0), tensor(1, 0, 1).log(), tensor(1, 100, 0))
    assert baseline.value == pytest.approx(0.5, rel=1e-15) and not baseline.fell_back
    assert opob(tensor(0, 0), tensor(0, 3).log(), tensor(1, 0.25)).value == 0.25


@pytest.mark.parametrize(
    ("log_u", "log_norm"),
    [
        (tensor(0, 0, 0), tensor(-math.inf, -math.inf, -math.inf)),
        (tensor(0, 0, 0), tensor(0, math.nan, 0)),
        (tensor(0, 0, 0), tensor(0, math.inf, 0)),
        (tensor(math.inf, 0, 0), tensor(0, 0, 0)),
        (tensor(math.inf, 0, 0), tensor(-math.inf, 0, 0)),
        (tensor(math.nan, math.nan, math.nan), tensor(0, 0, 0)),
    ],
)
def test_undefined_weights_fall_back_to_the_mean_and_say_so(log_u, log_norm):
    baseline = opob(log_u, log_norm, tensor(1, 0, 0.5))
    assert baseline.value == pytest.approx(0.5) and baseline.fell_back


def test_leave_one_out_known_answer():
    # weights^2 norms^2 = 1, 4, 9
    result = leave_one_out_opob(tensor(1, 2, 3).log(), tensor(1, 1, 1).log(), tensor(1, 0, 2))
    assert result.values.tolist() == pytest.approx([18 / 13, 19 / 10, 1 / 5], rel=1e-14)
    assert result.fallbacks == 0


def test_leave_one_out_does_not_see_its_own_reward():
    arguments = tensor(0.1, 0.7, -2), tensor(1, 0.5, 0)
    before = leave_one_out_opob(*arguments, tensor(1, 0, 2)).values
    after = leave_one_out_opob(*arguments, tensor(1, 55, 2)).values
    assert after[1] == pytest.approx(float(before[1]), rel=1e-12)
    assert after[0] != pytest.approx(float(before[0]))


def test_leave_one_out_falls_back_for_the_one_whose_others_are_zero():
    result = leave_one_out_opob(tensor(0, 0, 0), tensor(1, 0, 0).log(), tensor(8, 1, 3))
    assert result.values.tolist() == pytest.approx([2.0, 8.0, 8.0])
    assert result.fallbacks == 1


def test_group_of_one():
    assert opob(tensor(3), tensor(1), tensor(0.7)).value == 0.7
    alone = leave_one_out_opob(tensor(3), tensor(1), tensor(0.7))
    assert alone.values.tolist() == [0.7] and alone.fallbacks == 1


def test_controls():
    assert group_mean(tensor(1, 0, 0, 1)).value == 0.5
    assert zero(tensor(1, 0)).value == 0.0
    assert not group_mean(tensor(1)).fell_back and not zero(tensor(1)).fell_back


@pytest.mark.parametrize("function", [opob, leave_one_out_opob])
def test_shapes_are_checked(function):
    with pytest.raises(ValueError, match=r"log_grad_norm.*\(2,\)"):
        function(torch.zeros(3), torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="n > 0"):
        function(torch.zeros(0), torch.zeros(0), torch.zeros(0))
    with pytest.raises(ValueError, match=r"\[n\]"):
        function(torch.zeros(1, 3), torch.zeros(1, 3), torch.zeros(1, 3))


def small_policy_gradients(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Materialised score gradients [n, P] of a two-layer policy and log ratios [n] of random answers."""
    torch.manual_seed(11)
    policy = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).double()
    prompts = torch.randn(n, 3, 5, dtype=torch.float64)
    answers = torch.randint(0, 4, (n, 3))
    behavior = torch.randn(n, 3, 4, dtype=torch.float64).log_softmax(-1).gather(-1, answers[..., None])[..., 0]
    gradients, ratios = [], []
    for prompt, answer, mu in zip(prompts, answers, behavior, strict=True):
        logprobs = policy(prompt).log_softmax(-1).gather(-1, answer[:, None])[:, 0]
        gradient = torch.autograd.grad(logprobs.mean(), list(policy.parameters()))
        gradients.append(torch.cat([part.flatten() for part in gradient]))
        ratios.append((logprobs.detach() - mu).sum())
    return torch.stack(gradients), torch.stack(ratios)


def test_no_constant_on_a_grid_beats_opob():
    gradients, log_ratio = small_policy_gradients(8)
    rewards = tensor(1, 0, 0, 1, 0.5, 0, 0, 1)
    baseline = opob(log_ratio, gradients.norm(dim=1).log(), rewards).value

    def second_moment(b: float) -> float:
        contributions = log_ratio.exp()[:, None] * (rewards - b)[:, None] * gradients
        return float(contributions.pow(2).sum())

    step = 1e-3
    grid = [i * step for i in range(-500, 1501)]
    moments = [second_moment(b) for b in grid]
    best = grid[moments.index(min(moments))]
    assert second_moment(baseline) <= min(moments)
    assert abs(baseline - best) <= step
    # The search can tell: the mean and the twice-counted weight are beaten by the grid.
    twice = opob(log_ratio, log_ratio + gradients.norm(dim=1).log(), rewards).value
    assert second_moment(twice) > min(moments) and second_moment(group_mean(rewards).value) > min(moments)


@pytest.mark.parametrize("name", ["opob", "opob_leave_one_out"])
def test_baselines_of_norms_are_formed_where_those_are(name):
    """On tensors without numbers, where whoever asks for one gets an error."""
    log_u, norms, rewards = (torch.zeros(3, dtype=torch.float64, device="meta") for _ in range(3))
    found = from_norms(name, log_u, norms, rewards)
    assert found.values.is_meta and found.values.shape == found.plain.shape == (3,)


def test_leave_one_out_means():
    assert leave_one_out(tensor(1, 0, 2)).values.tolist() == pytest.approx([1.0, 1.5, 0.5])
    assert leave_one_out(tensor(0.1, 0.1, 0.1)).values.tolist() == [0.1] * 3
    assert leave_one_out(tensor(3)).fallbacks == 1 and leave_one_out(tensor(1, 0, 2)).fallbacks == 0


def test_baselines_by_name():
    rewards = tensor(1, 0, 2)
    assert before_norms("opob", rewards).tolist() == before_norms("group_mean", rewards).tolist() == [1.0] * 3
    assert before_norms("zero", rewards).tolist() == [0.0] * 3
    assert before_norms("leave_one_out", rewards).tolist() == pytest.approx([1.0, 1.5, 0.5])
    norms = tensor(1, 2, 3).log()
    assert from_norms("opob", tensor(0, 0, 0), norms, rewards).values.tolist() == pytest.approx([19 / 14] * 3)
    assert from_norms("opob_leave_one_out", tensor(0, 0, 0), norms, rewards).values.tolist() == pytest.approx(
        [18 / 13, 19 / 10, 1 / 5]
    )
    assert from_norms("opob", tensor(0, 0, 0), tensor(math.nan, 0, 0), rewards).fallbacks == 3
