"""Loss normalisations: literal coefficients, and the sums that define each rule."""

from __future__ import annotations

import pytest
import torch

from vcpo_megatron.algorithm.normalization import RULES, loss_coefficients

TOKENS = torch.tensor([2, 8, 10])


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("sequence_token_mean", [1 / 6, 1 / 24, 1 / 30]),
        ("token_mean", [1 / 20, 1 / 20, 1 / 20]),
        ("sequence_token_sum", [1 / 3, 1 / 3, 1 / 3]),
        ("constant", [1 / 48, 1 / 48, 1 / 48]),
    ],
)
def test_known_answers(rule, expected):
    coefficients = loss_coefficients(rule, TOKENS, 16)
    assert coefficients.dtype == torch.float64
    assert coefficients.tolist() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("rule", ["sequence_token_mean", "token_mean"])
def test_means_weigh_one_in_total(rule):
    assert float((loss_coefficients(rule, TOKENS, 16) * TOKENS).sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("rule", RULES)
def test_a_trajectory_without_tokens_stays_finite_and_counts_in_n(rule):
    coefficients = loss_coefficients(rule, torch.tensor([0, 4]), 16)
    assert coefficients.isfinite().all()
    if rule == "sequence_token_mean":
        assert coefficients[1] == 1 / 8


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tokens", [[0, 0], []])
def test_a_minibatch_without_tokens_is_refused(rule, tokens):
    with pytest.raises(ValueError, match="no sampled token"):
        loss_coefficients(rule, torch.tensor(tokens, dtype=torch.long), 16)


def test_bad_arguments():
    with pytest.raises(ValueError, match="loss_normalization = 'mean'"):
        loss_coefficients("mean", TOKENS, 16)
    with pytest.raises(ValueError, match="max_new_tokens = 0"):
        loss_coefficients("constant", TOKENS, 0)
    with pytest.raises(ValueError, match="-1"):
        loss_coefficients("constant", torch.tensor([3, -1]), 16)
    with pytest.raises(ValueError, match="expected integers"):
        loss_coefficients("constant", TOKENS.float(), 16)
