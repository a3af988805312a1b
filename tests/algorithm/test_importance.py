"""Sums and weights: masked positions never reach an arithmetic operation, exp never overflows."""

from __future__ import annotations

import math

import pytest
import torch

from vcpo_megatron.algorithm.importance import (
    log_ratios,
    masked_log_weights,
    mismatch_weights,
    segment_max,
    segment_sum,
    threshold_growth,
    token_log_ratios,
    truncated_log_weights,
    truncated_weights,
)


def test_segment_sum_known_answer_in_any_order():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    mask = torch.tensor([True, True, False, True, True])
    segment_ids = torch.tensor([2, 0, 0, 2, 0])
    total = segment_sum(values, mask, segment_ids, 4)
    assert total.dtype == torch.float64
    assert total.tolist() == [18.0, 0.0, 9.0, 0.0]


def test_segment_max_known_answer_keeps_nan_in_its_segment():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, math.nan, math.nan])
    mask = torch.tensor([True, True, False, True, True, False])
    largest = segment_max(values, mask, torch.tensor([2, 0, 0, 2, 1, 0]), 4)
    assert largest.dtype == torch.float64
    assert [largest[i].item() for i in (0, 2, 3)] == [2.0, 8.0, 0.0] and math.isnan(largest[1])
    assert segment_max(values[:0], mask[:0], torch.zeros(0, dtype=torch.long), 0).shape == (0,)


def test_segment_sum_ignores_values_and_ids_of_masked_tokens():
    values = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    mask = torch.tensor([True, False, False, False])
    assert segment_sum(values, mask, torch.tensor([0, -1, 99, 0]), 1).tolist() == [1.0]


def test_segment_sum_keeps_a_bad_value_inside_its_segment():
    total = segment_sum(torch.tensor([math.nan, 3.0]), torch.tensor([True, True]), torch.tensor([0, 1]), 2)
    assert math.isnan(total[0]) and total[1] == 3.0


def test_segment_sum_gradient_is_the_mask_even_next_to_infinities():
    values = torch.tensor([1.0, -math.inf, 2.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    segment_sum(values, mask, torch.tensor([0, 0, 1]), 2)[1].backward()
    assert values.grad.tolist() == [0.0, 0.0, 1.0]


def test_segment_sum_of_padding_only_is_empty():
    total = segment_sum(torch.ones(3), torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int32), 0)
    assert total.shape == (0,)


def test_segment_max_of_padding_only_is_empty():
    nothing = torch.tensor([False, False])
    assert segment_max(torch.tensor([1.0, 2.0]), nothing, torch.tensor([0, 0]), 0).tolist() == []


def test_segment_sum_accumulates_in_double():
    # 2^24 is where float32 stops counting.
    values = torch.tensor([2.0**24] + [1.0] * 8)
    total = segment_sum(values, torch.ones(9, dtype=torch.bool), torch.zeros(9, dtype=torch.long), 1)
    assert total.item() == 2**24 + 8


def test_segment_sum_keeps_the_digits_of_double_input():
    values = torch.tensor([1.0, 2.0**-40], dtype=torch.float64)
    mask, ids = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.long)
    assert segment_sum(values, mask, ids, 1).item() == 1.0 + 2.0**-40
    assert segment_sum(values[:1] + values[1:], mask[:1], ids[:1], 1).item() == 1.0 + 2.0**-40


def test_a_segment_id_out_of_range_is_not_dropped_silently():
    for bad in (2, -1):
        with pytest.raises((IndexError, RuntimeError)):
            segment_sum(torch.ones(2), torch.ones(2, dtype=torch.bool), torch.tensor([0, bad]), 2)


@pytest.mark.parametrize(
    ("values", "mask", "ids", "message"),
    [
        (torch.ones(3), torch.ones(2, dtype=torch.bool), torch.zeros(3, dtype=torch.long), "one shape"),
        (torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3, dtype=torch.long), "one shape"),
        (torch.ones(3), torch.ones(3), torch.zeros(3, dtype=torch.long), "mask is torch.float32"),
        (torch.ones(3), torch.ones(3, dtype=torch.bool), torch.zeros(3), "segment_ids is torch.float32"),
    ],
)
def test_segment_sum_refuses_what_does_not_fit(values, mask, ids, message):
    with pytest.raises(ValueError, match=message):
        segment_sum(values, mask, ids, 1)


def test_log_ratios_known_answer():
    policy = torch.tensor([-1.0, -2.0, -3.0, -4.0], requires_grad=True)
    behavior = torch.tensor([-1.5, -1.0, -7.0, -4.5])
    mask = torch.tensor([True, True, False, True])
    ratios = log_ratios(policy, behavior, mask, torch.tensor([0, 0, 0, 1]), 2)
    assert ratios.tolist() == [-0.5, 0.5]
    assert not ratios.requires_grad


def test_log_ratios_of_masked_infinities_are_untouched():
    # inf - inf would be nan, and nan * 0 stays nan: the mask must come first.
    policy = torch.tensor([-1.0, -math.inf, math.nan])
    behavior = torch.tensor([-1.0, -math.inf, 0.0])
    mask = torch.tensor([True, False, False])
    assert log_ratios(policy, behavior, mask, torch.zeros(3, dtype=torch.long), 1).tolist() == [0.0]
    assert token_log_ratios(policy, behavior, mask).tolist() == [0.0, 0.0, 0.0]


def test_changing_masked_values_never_moves_the_result():
    generator = torch.Generator().manual_seed(0)
    policy, behavior = torch.randn(2, 50, generator=generator)
    mask = torch.rand(50, generator=generator) < 0.5
    ids = torch.randint(0, 4, (50,), generator=generator)
    before = log_ratios(policy, behavior, mask, ids, 4)
    policy[~mask] = torch.randn(int((~mask).sum()), generator=generator) * 1e30
    behavior[~mask] = math.nan
    assert torch.equal(before, log_ratios(policy, behavior, mask, ids, 4))


def test_truncated_weights_known_answer_and_extremes():
    ratios = torch.tensor([0.0, math.log(2), math.log(9), 2000.0, -2000.0, math.inf], dtype=torch.float64)
    expected = torch.tensor([1.0, 2.0, 8.0, 8.0, 0.0, 8.0], dtype=torch.float64)
    torch.testing.assert_close(truncated_weights(ratios, 8.0), expected, rtol=1e-15, atol=0)
    assert truncated_log_weights(ratios, 8.0)[3] == math.log(8.0)
    assert truncated_log_weights(ratios, math.inf)[3] == 2000.0


def test_a_bound_grows_with_the_square_root_of_the_length():
    growth = threshold_growth(torch.tensor([0, 50, 100, 400, 900]), 100)
    assert growth.dtype == torch.float64
    assert growth.tolist() == [1.0, 1.0, 1.0, 2.0, 3.0]
    assert threshold_growth(torch.tensor([0, 50, 900]), None).tolist() == [1.0, 1.0, 1.0]
    ratios = torch.full((5,), math.log(100.0), dtype=torch.float64)
    ratios[3], ratios[4] = math.log(65.0), math.nan  # 8 to the power of 2 is 64
    weights = truncated_log_weights(ratios, 8.0, growth).exp()
    torch.testing.assert_close(weights[:4], torch.tensor([8.0, 8.0, 8.0, 64.0]).double(), rtol=1e-15, atol=0)
    assert weights[4].isnan()
    ratios[4] = math.log(511.0)
    assert masked_log_weights(ratios, 8.0, growth).isfinite().tolist() == [False] * 4 + [True]
    assert truncated_log_weights(ratios, math.inf, growth).tolist() == ratios.tolist()


def test_nan_log_ratio_stays_nan():
    assert truncated_weights(torch.tensor([math.nan]), 8.0).isnan().all()


@pytest.mark.parametrize("threshold", [0.0, -1.0, math.nan])
def test_threshold_must_be_positive(threshold):
    with pytest.raises(ValueError, match="is_threshold"):
        truncated_weights(torch.zeros(1), threshold)


def test_the_mask_comes_before_exp_and_log_ratios_are_never_weights_in_between() -> None:
    """exp would overflow or vanish, 0 times what a masked row holds is nan, and a sampled token's nan must be seen."""
    policy = torch.tensor([-1.0, -2000.0, float("nan"), float("nan"), float("inf"), -torch.inf])
    behavior = torch.tensor([-2001.0, -1.0, -1.0, -1.0, 0.0, 0.0])
    mask = torch.tensor([True, True, True, False, False, False])
    found = token_log_ratios(policy, behavior, mask).tolist()
    assert found[:2] == [2000.0, -1999.0] and found[2] != found[2] and found[3:] == [0.0, 0.0, 0.0]


def test_mismatch_weights_are_ratios_of_the_record_to_the_behaviour_up_to_a_cap():
    recorded = torch.log(torch.tensor([0.5, 0.4, 0.1, 0.3, 0.9]))
    behavior = torch.log(torch.tensor([0.25, 0.1, 0.2, math.nan, 1e-30]))
    mask = torch.tensor([True, True, True, False, True])
    found = mismatch_weights(recorded, behavior, mask, 3.0)
    assert found.dtype == torch.float64 and found.tolist() == pytest.approx([2.0, 3.0, 0.5, 1.0, 3.0], rel=1e-6)
    assert math.isfinite(mismatch_weights(recorded, behavior, mask, math.inf)[-1])
