"""Every surrogate against literal numbers, and against the derivative of the objective it stands for."""

from __future__ import annotations

import math

import pytest
import torch

from vcpo_megatron.algorithm import importance
from vcpo_megatron.algorithm.surrogates import (
    STATISTICS,
    SURROGATES,
    Bounds,
    TokenTerms,
    asymmetric,
    cispo,
    ctpo,
    decoupled_ppo,
    fspo,
    geometric_mask,
    gspo,
    m2po,
    m2po_clip,
    p3o,
    ppo_clip,
    second_moment_cutoff,
    second_moment_range,
    token_ess,
    token_veto,
    veto,
)
from vcpo_megatron.config.methods import METHODS

CLIP = Bounds(8.0, 0.8, 1.2)


def tokens(ratios: list[list[float]], statistic: float = math.nan, masked: int = 0) -> TokenTerms:
    """Trajectories of these token ratios, then ``masked`` masked tokens of the last trajectory."""
    flat = [r for one in ratios for r in one] + [1.0] * masked
    segments = [i for i, one in enumerate(ratios) for _ in one] + [len(ratios) - 1] * masked
    mask = torch.tensor([True] * (len(flat) - masked) + [False] * masked)
    log_ratio = torch.tensor(flat, dtype=torch.float64).log()
    return TokenTerms(log_ratio, mask, torch.tensor(segments), len(ratios), statistic)


def advantages(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(found: torch.Tensor, *expected: float) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_ppo_clip() -> None:
    """Positive: above 1.2 closed. Negative: below 0.8 closed, above 1.2 open (the pessimistic side)."""
    close(ppo_clip(tokens([[0.5, 1.1, 1.3], [0.5, 1.1, 1.3]]), advantages(2, -2), CLIP), 1.0, 2.2, 0, 0, -2.2, -2.6)


def test_a_ratio_on_its_bound_is_open() -> None:
    close(ppo_clip(tokens([[1.0], [1.0]]), advantages(2, -2), Bounds(8.0, 0.8, 1.0)), 2, -2)
    close(ppo_clip(tokens([[1.0], [1.0]]), advantages(2, -2), Bounds(8.0, 1.0, 1.2)), 2, -2)


def test_decoupled_ppo() -> None:
    """The weight to the behaviour is truncated at 8; the proximal ratio is 1, which bounds below it close for A > 0."""
    t = tokens([[13.0], [13.0], [2.0]])
    close(decoupled_ppo(t, advantages(1, -1, 1), CLIP), 8.0, -8.0, 2.0)
    close(decoupled_ppo(t, advantages(1, -1, 1), Bounds(8.0, 0.8, 0.9)), 0.0, -8.0, 0.0)


def test_gspo() -> None:
    """Geometric means 2, 0.5 and 1; a masked token counts in no length."""
    t = tokens([[4.0, 1.0], [0.25, 1.0], [2.0, 0.5]], masked=2)
    bounds = Bounds(8.0, 0.9, 1.1)
    close(gspo(t, advantages(-1, 1, 3), bounds)[:6], -2, -2, 0.5, 0.5, 3, 3)
    close(gspo(t, advantages(1, -1, 3), bounds)[:6], 0, 0, 0, 0, 3, 3)


def test_a_trajectory_without_tokens_here_spoils_no_other() -> None:
    """A rank of context parallelism may hold none of its sampled tokens, and one of another."""
    log_ratio = torch.tensor([math.log(1.05), 2.0], dtype=torch.float64)
    t = TokenTerms(log_ratio, torch.tensor([True, False]), torch.tensor([0, 1]), 2)
    close(gspo(t, advantages(3, 1), Bounds(8.0, 0.9, 1.1))[:1], 3.15)


def test_m2po_drops_the_largest_until_the_mean_square_is_small() -> None:
    logs = torch.tensor([0.1, -0.2, 0.3, 1.0], dtype=torch.float64)
    # sorted squares .01 .04 .09 1: means .01 .025 .0467 .285
    assert second_moment_cutoff(logs, 0.04) == pytest.approx(0.04)
    assert second_moment_cutoff(logs, 0.05) == pytest.approx(0.09)
    assert second_moment_cutoff(logs, 10.0) == 1.0
    assert second_moment_cutoff(logs, 1e-9) == pytest.approx(0.01)  # one is always kept
    t = tokens([[math.exp(0.1), math.exp(-0.2), math.exp(0.3)]], statistic=0.05)
    close(m2po(t, advantages(2), CLIP), 2 * math.exp(0.1), 2 * math.exp(-0.2), 0)


def test_m2po_clip_solves_one_range() -> None:
    """Squares .01 .04 .09 1 of updates that lead away; capped at each, they sum to .04 .13 .23 1.14."""
    logs, a = torch.tensor([0.1, -0.2, 0.3, 1.0], dtype=torch.float64), advantages(1, -1, 1, 2)
    for bound, tau in ((0.3, 1.0), (0.286, 1.0), (0.28, 0.3), (0.06, 0.3), (0.05, 0.2), (0.03, 0.1), (0.011, 0.1)):
        assert second_moment_range(logs, a, bound) == pytest.approx(tau**2), bound
    assert second_moment_range(logs, a, 0.009) == 0.0  # the smallest is too large: all of them are clipped
    # what leads back, or has no advantage, is not looked at, however far away it is
    back = torch.tensor([-5.0, 9.0, 3.0, -3.0], dtype=torch.float64)
    both, signs = torch.cat([logs, back]), torch.cat([a, advantages(1, -1, 0, 0)])
    assert second_moment_range(both, signs, 0.05) == pytest.approx(0.04)
    assert second_moment_range(back, advantages(1, -1, 0, 0), 0.05) == 0.0
    one = torch.tensor([710.0], dtype=torch.float64)
    assert second_moment_range(one, advantages(1), 0.04) == 0.0


def test_m2po_clip_closes_what_leads_away_beyond_the_range() -> None:
    """tau = 0.2. Of a positive answer ratios above e^0.2 are closed, of a negative one those below e^-0.2."""
    logs = [0.1, -0.2, 0.3, -0.3, 0.2]
    rows = [[math.exp(log) for log in logs]] * 3
    expected = [2 * rows[0][0], 2 * rows[0][1], 0, 2 * rows[0][3], 2 * rows[0][4]]
    negative = [-rows[0][0], -rows[0][1], -rows[0][2], 0, -rows[0][4]]
    t = tokens(rows, statistic=math.log(math.exp(0.2)) ** 2 + 1e-15)
    close(m2po_clip(t, advantages(2, -1, 0), CLIP), *expected, *negative, *[0] * 5)
    # where m2po drops a token for being extreme, in whatever direction
    close(m2po(t, advantages(2, -1, 0), CLIP)[5:10], *negative[:2], 0, 0, negative[4])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_m2po_clip_is_the_derivative_of_a_clip_to_its_range(sign: float) -> None:
    logs = torch.linspace(-1, 1, 41, dtype=torch.float64)[:40].requires_grad_()
    tau = math.sqrt(second_moment_range(logs.detach(), torch.full((40,), sign, dtype=torch.float64), 0.1))
    assert 0.3 < tau < 0.5
    low, high = math.exp(-tau - 1e-9), math.exp(tau + 1e-9)
    ratio = logs.exp()
    (expected,) = torch.autograd.grad(torch.minimum(ratio * sign, ratio.clamp(low, high) * sign).sum(), logs)
    of_one = torch.ones(40, dtype=torch.bool), torch.zeros(40, dtype=torch.long), 1
    t = TokenTerms(logs.detach(), *of_one, tau**2 + 1e-12)
    torch.testing.assert_close(m2po_clip(t, advantages(sign), CLIP), expected)


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("far", [89.0, 710.0, 1e4])
def test_no_surrogate_is_infinite_and_none_is_nan(name: str, far: float) -> None:
    """Far away tokens meet advantages above, of and below 0, with bounds and without."""
    logs = torch.tensor([far, -far, 0.0] * 3, dtype=torch.float64)
    t = TokenTerms(logs, torch.ones(9, dtype=torch.bool), torch.arange(3).repeat_interleave(3), 3, 0.5)
    for bounds in (CLIP, Bounds(math.inf, 0.0, math.inf)):
        for values in ((1, 0, -1), (-1, -1, -1), (0, 0, 0)):
            found = SURROGATES[name](t, advantages(*values), bounds)
            assert found.isfinite().all() and found.abs().max() <= math.exp(20), (values, bounds)
            if name != "p3o":
                assert bool((found.view(3, 3)[advantages(*values) == 0] == 0).all())


def test_a_ratio_stops_at_its_limit_and_is_exact_below() -> None:
    logs = torch.tensor([-1e4, -3.0, 19.9, 20.0, 21.0, 710.0, math.inf, math.nan], dtype=torch.float64)
    found = importance.bounded_exp(logs)
    assert found[:4].tolist() == logs[:4].exp().tolist()
    assert found[4:7].tolist() == [math.exp(20)] * 3 and math.isnan(found[7])


def test_cispo_never_loses_a_token() -> None:
    close(cispo(tokens([[0.1, 2.0, 9.0]]), advantages(-2), Bounds(8.0, 0.5, 5.0)), -1, -4, -10)


def test_p3o() -> None:
    assert token_ess(torch.tensor([1.0, 3.0]).log()) == pytest.approx(16 / 10 / 2)
    # d KL / d log pi = 1 - 1/r: -1 at r = 1/2, 2/3 at r = 3, 1 - e^10 from r = e^-10 down
    close(p3o(tokens([[0.5, 3.0]], statistic=0.8), advantages(2), CLIP), 0.5 * 2 + 0.2, 0.8 * 2 - 0.2 * 2 / 3)
    close(
        p3o(tokens([[math.exp(-10)], [math.exp(-300)]], statistic=0.5), advantages(0, 0), CLIP),
        *[-0.5 * (1 - math.exp(10))] * 2,
    )


def test_p3o_is_the_derivative_of_its_authors_loss() -> None:
    """-(sg(min(r, e)) log pi A) + (1 - e) (log r + 1/r - 1), by autograd; on-policy it is the plain score function."""
    logs = torch.linspace(-2, 2, 21, dtype=torch.float64).requires_grad_()
    loss = -(logs.exp().clamp(max=0.6).detach() * logs * 1.5) + 0.4 * (logs + (-logs).exp() - 1)
    (expected,) = torch.autograd.grad(loss.sum(), logs)
    t = TokenTerms(logs.detach(), torch.ones(21, dtype=torch.bool), torch.zeros(21, dtype=torch.long), 1, 0.6)
    torch.testing.assert_close(p3o(t, advantages(1.5), CLIP), -expected)
    close(p3o(tokens([[1.0, 1.0]], statistic=1.0), advantages(-3), CLIP), -3, -3)


def test_veto_removes_the_suffix_of_negative_answers_only() -> None:
    bounds = Bounds(8.0, 0.2, 5.0)
    ratios = [[1.0, 6.0, 1.0], [1.0, 6.0, 1.0], [1.0, 1.0, 0.1]]
    close(veto(tokens(ratios), advantages(1, -1, -1), bounds), 1, 0, 1, -1, 0, 0, -1, -1, 0)


def test_asymmetric() -> None:
    t = tokens([[2.0, 2.0], [2.0, 2.0], [0.5, 0.5]])
    close(asymmetric(t, advantages(1, -1, -1), CLIP), 1, 1, -1, -1, -0.25, -0.25)


def test_running_sums_stay_in_their_trajectory() -> None:
    """Over sampled tokens only, whatever lies where there are none; a padded token is in no trajectory."""
    values = torch.tensor([1.0, 2.0, 4.0, math.nan, 8.0, 16.0, 32.0, 5.0], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False, True, True, True, False])
    t = TokenTerms(torch.zeros(8, dtype=torch.float64), mask, torch.tensor([0, 0, 0, 0, 0, 1, 1, 2]), 2)
    close(t.running_sums(values), 1, 3, 7, 7, 15, 16, 48, 0)


def test_ctpo() -> None:
    """The ratio so far: 1.5, 3, 3 of 1.5, 2, 1, in windows of exp(sqrt(t)): e, 4.1, 5.7. Above, both signs are closed,
    below only the negative one; a masked token counts in no position."""
    bounds = Bounds(8.0, math.exp(-1), math.exp(1))
    t = tokens([[1.5, 2.0, 1.0], [3.0, 1.0, 2.0], [3.0, 1.0, 2.0], [0.25, 1.0, 1.0], [0.25, 1.0, 1.0]], masked=1)
    found = ctpo(t, advantages(2, 1, -1, 1, -1), bounds)
    # 3 > e; 3 < e^sqrt(2) = 4.1; 6 > e^sqrt(3) = 5.7; 0.25 < 1/e, > e^-sqrt(2) = 0.243
    close(found[:-1], 3, 6, 6, 0, 3, 0, 0, -3, 0, 0.25, 0.25, 0.25, 0, -0.25, -0.25)


def test_fspo() -> None:
    """Sequence ratios of 4 tokens in a band of exp(-2) to exp(2) = 7.39, of one token in exp(-1) to exp(1)."""
    bounds = Bounds(8.0, math.exp(-1), math.exp(1))
    t = tokens([[2.0, 3.0, 1.0, 1.0], [2.0, 4.0, 1.0, 1.0], [2.0, 4.0, 1.0, 1.0], [3.0], [0.1], [0.1]])
    expected = [6.0] * 4 + [0.0] * 4 + [-8.0] * 4 + [0.0, 0.1, 0.0]
    close(fspo(t, advantages(1, 1, -1, 1, 1, -1), bounds), *expected)


def test_geometric_mask() -> None:
    """Geometric means 2, sqrt(2) and 0.5 in a band of 0.6 to 1.5; what is left has truncated token weights."""
    t = tokens([[2.0, 2.0], [16.0, 0.125], [0.5, 0.5]], masked=1)
    close(geometric_mask(t, advantages(1, -3, 1), Bounds(8.0, 0.6, 1.5))[:6], 0, 0, -24, -0.375, 0, 0)


def test_token_veto() -> None:
    """One token below 1e-4 costs its trajectory, one above 8 is truncated; a masked one vetoes nothing."""
    t = tokens([[2.0, 9e-5], [2.0, 1.1e-4], [20.0, 1.0]])
    close(token_veto(t, advantages(1, 1, -1), Bounds(8.0, 1e-4, math.inf)), 0, 0, 2, 1.1e-4, -8, -1)
    masked = TokenTerms(torch.tensor([0.0, -50.0]).double(), torch.tensor([True, False]), torch.tensor([0, 0]), 1)
    close(token_veto(masked, advantages(3), Bounds(8.0, 1e-4, math.inf))[:1], 3)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ppo_clip_is_the_derivative_of_its_objective(sign: float) -> None:
    logs = torch.linspace(-1, 1, 41, dtype=torch.float64).requires_grad_()
    ratio = logs.exp()
    objective = torch.minimum(ratio * sign, ratio.clamp(0.8, 1.2) * sign).sum()
    (expected,) = torch.autograd.grad(objective, logs)
    t = TokenTerms(logs.detach(), torch.ones(41, dtype=torch.bool), torch.zeros(41, dtype=torch.long), 1)
    torch.testing.assert_close(ppo_clip(t, advantages(sign), CLIP), expected)


def test_masked_and_band_weights() -> None:
    logs = torch.tensor([0.1, 0.5, 5.0, 8.0, 9.0], dtype=torch.float64).log()
    close(importance.log_weights("truncated", logs, 8.0, 0.5, 5.0).exp(), 0.1, 0.5, 5, 8, 8)
    close(importance.log_weights("masked", logs, 8.5, 0.5, 5.0).exp(), 0.1, 0.5, 5, 8, 0)
    close(importance.log_weights("band", logs, 8.0, 0.45, 5.5).exp(), 0, 0.5, 5, 0, 0)
    assert importance.log_weights("masked", torch.tensor([2000.0]), 8.0, 0, 1).exp().tolist() == [0.0]
    with pytest.raises(ValueError, match="weights = 'x'"):
        importance.log_weights("x", logs, 8.0, 0.5, 5.0)


def test_every_preset_names_functions_that_exist() -> None:
    for name, preset in METHODS.items():
        assert preset.surrogate == "weighted" or preset.surrogate in SURROGATES, name
        assert preset.weights in importance.LOG_WEIGHTS and preset.statistic in {"", *STATISTICS}, name


#: What is known of presets; a new preset needs no entry here.
UNCORRECTED, NORMS, SCALED = {"reinforce", "rloo"}, {"vcpo", "vcpo_opob_only"}, {"vcpo", "vcpo_ess_only"}
LINEAR = UNCORRECTED | NORMS | SCALED | {"tis_token", "tis_sequence", "mis", "icepop"}
CLIPPED = {"grpo", "dr_grpo", "ppo_clip", "decoupled_ppo", "gspo", "m2po", "m2po_clip", "cispo", "p3o", "mu_grpo"}
CLIPPED |= {"asymmetric", "ctpo", "fspo", "mis_geometric", "tis_veto"}


def test_presets_say_what_they_are() -> None:
    known = {name: METHODS[name] for name in LINEAR | CLIPPED}
    assert {name for name, preset in known.items() if not preset.corrected} == UNCORRECTED
    assert {name for name, preset in known.items() if preset.needs_norms} == NORMS
    assert {name for name, preset in known.items() if preset.ess_scaling} == SCALED
    assert {name for name, preset in known.items() if preset.linear} == LINEAR
    assert {name for name, preset in known.items() if preset.whole_batch} == {"p3o"}
