"""The base of the step size: a number, or followed from tokens of the current version; and what a checkpoint keeps."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.slow import matrix
from vcpo_megatron.algorithm.ess import ess_ratio
from vcpo_megatron.algorithm.noise import noise_ess_ratio, noise_inflation
from vcpo_megatron.config.schema import AlgorithmConfig
from vcpo_megatron.learner.step.batch_state import BatchState
from vcpo_megatron.learner.step.step_size import EssState, StepBounds, batch_ess_ratio
from vcpo_megatron.types import Batch, PolicyVersion, Trajectory, VersionSpan

from ..oracles import Policy
from ..scenarios import make_batch, make_config, make_model_folder
from ..world import run_world
from .test_batch_state import state_of

AUTO = AlgorithmConfig.model_validate({"base_ess_ratio": "auto"})
COUNT = 64


def batch(
    lengths: Sequence[int], sigma: float, seed: int, *, current: float = 1.0, group: int = 1, lag: float = 0.0
) -> BatchState:
    """Answers of these lengths whose tokens have independent noise of ``sigma``.

    current  share of an answer, its first, that the current version sampled
    group    so many neighbouring tokens share their noise
    lag      RMS of a true drift, nats an answer
    """
    state = state_of(tuple(float(i % 2) for i in range(len(lengths))))
    state.sampled_tokens = torch.tensor(lengths).double()
    generator = torch.Generator().manual_seed(seed)
    for i, length in enumerate(lengths):
        tokens = sigma * torch.randn(length // group, generator=generator, dtype=torch.float64).repeat_interleave(group)
        tokens -= sigma**2 / 2
        own = tokens[: int(current * length)]
        state.log_ratio[i] = tokens.sum() + lag * torch.randn((), generator=generator, dtype=torch.float64)
        state.mismatch_tokens[i], state.noise_sum[i], state.noise_squares[i] = len(own), own.sum(), own.square().sum()
    return state


def step(ess: EssState, state: BatchState, algorithm: AlgorithmConfig = AUTO) -> tuple[EssState, float, float | None]:
    """As in ``VcpoStep.run``: the state after a step that is taken, its scale, and the on-policy ratio."""
    ratio = batch_ess_ratio(state, algorithm.ess_weights, algorithm.is_threshold)
    seen = ess.observed(state)
    on_policy = seen.on_policy_ratio(state, algorithm)
    return seen.taken(ratio, state, algorithm, StepBounds(), 1.0), seen.scale(ratio, on_policy, algorithm), on_policy


def warmed_up(lengths: Sequence[int], sigma: float, group: int = 1) -> EssState:
    """After the five on-policy steps."""
    ess = EssState()
    for seed in range(5):
        ess, scale, _ = step(ess, batch(lengths, sigma, seed, group=group))
        assert scale == 1.0
    return ess


def test_the_first_five_steps_are_full_ones_and_their_median_is_the_base() -> None:
    """Where no token of a current version was ever seen, of the ratios of five steps."""
    ess, ratios = EssState(), []
    for seed in range(6):
        state = batch([100] * COUNT, 0.05, seed, current=0.0)
        ratios.append(ess_ratio(state.log_ratio))
        ess, scale, on_policy = step(ess, state)
        assert on_policy is None
    assert ess.first_ratios == ratios[:5] and ess.previous_ratio == ratios[5]
    assert scale == pytest.approx(min(1.0, ratios[5] / statistics.median(ratios[:5])) ** 0.5)


def test_the_base_is_near_the_median_of_the_first_steps_at_their_lengths() -> None:
    ess = warmed_up([400] * COUNT, 0.05)  # V = 1
    _, _, on_policy = step(ess, batch([400] * COUNT, 0.05, 9))
    assert on_policy == pytest.approx(statistics.median(ess.first_ratios), rel=0.12)
    assert on_policy == pytest.approx(0.446, rel=0.1)  # drawn by another program; exp(-1) = .37 of very many answers


def test_it_follows_the_lengths() -> None:
    """Three times as long: V = 3. The noise is the same, and the base falls; so the step stays a full one, which the
    median of the first steps would cut to sqrt(.175 / .446)."""
    ess = warmed_up([400] * COUNT, 0.05)
    fixed = AlgorithmConfig.model_validate({"base_ess_ratio": statistics.median(ess.first_ratios)})
    scales: dict[str | float, list[float]] = {"auto": [], fixed.base_ess_ratio: []}
    for seed in range(20, 35):
        for algorithm in (AUTO, fixed):
            _, scale, on_policy = step(ess, batch([1200] * COUNT, 0.05, seed, current=0.05), algorithm)
            scales[algorithm.base_ess_ratio].append(scale)
            assert on_policy == pytest.approx(0.175, rel=0.1)  # the median of 4,000 batches drawn by another program
    assert statistics.median(scales["auto"]) > 0.95
    assert statistics.median(scales[fixed.base_ess_ratio]) == pytest.approx(0.63, abs=0.06)


def test_it_follows_the_noise_of_young_tokens_and_is_kept_without_any() -> None:
    """The noise falls to a half, which a twentieth of the tokens say; then nothing says anything."""
    ess = warmed_up([400] * COUNT, 0.05)
    for seed in range(60):
        ess, _, _ = step(ess, batch([400] * COUNT, 0.025, seed, current=0.05))
    _, _, on_policy = step(ess, batch([400] * COUNT, 0.025, 99, current=0.05))
    assert on_policy == pytest.approx(0.78, rel=0.05)  # exp(-1/4)
    silent, _, kept = step(ess, batch([400] * COUNT, 5.0, 7, current=0.0))
    assert kept == pytest.approx(on_policy, rel=0.01)
    noise = ("noise_tokens", "noise_mean", "noise_square", "inflations")
    assert [getattr(silent, name) for name in noise] == [getattr(ess, name) for name in noise]


def test_what_is_lag_is_not_in_the_base() -> None:
    ess = warmed_up([400] * COUNT, 0.02)
    _, scale, on_policy = step(ess, batch([400] * COUNT, 0.02, 9, current=0.1, lag=1.5))
    assert on_policy == pytest.approx(0.85, rel=0.05) and scale < 0.7


def test_noise_that_goes_along_with_its_neighbours_weighs_more() -> None:
    """Four tokens share their noise, which makes V four times what tokens alone say: 4, not 1."""
    ess = warmed_up([400] * COUNT, 0.05, group=4)
    assert statistics.median(ess.inflations) == pytest.approx(4.0, rel=0.35)
    ess, _, on_policy = step(ess, batch([400] * COUNT, 0.05, 9, group=4))
    assert on_policy == pytest.approx(statistics.median(ess.first_ratios), rel=0.35)
    assert len(ess.inflations) == 5
    assert step(EssState(), batch([400] * COUNT, 0.05, 9, current=0.9))[0].inflations == []  # not on-policy
    assert step(EssState(), batch([4] * COUNT, 0.0, 9))[0].inflations == []  # no noise to speak of


def test_a_configured_number_stays_what_it_is() -> None:
    half = AlgorithmConfig.model_validate({"base_ess_ratio": 0.5})
    state = batch([400] * COUNT, 0.05, 9)
    _, scale, on_policy = step(EssState(), state, half)
    assert scale == pytest.approx(min(1.0, ess_ratio(state.log_ratio) / 0.5) ** 0.5) and on_policy is not None
    off = AlgorithmConfig.model_validate({"ess_scaling": False})
    assert step(EssState(), state, off)[1] == 1.0


def test_a_ratio_of_the_lag_alone_has_no_mismatch_to_expect() -> None:
    """Tokens have noise, of which recorded log-probs leave nothing in the ratio."""
    recorded = AlgorithmConfig.model_validate({"mismatch": "recorded"})
    state = batch([400] * COUNT, 0.05, 9)
    ess, scale, on_policy = step(EssState(), state, recorded)
    assert on_policy is None and ess.inflations == []
    assert scale == pytest.approx(ess_ratio(state.log_ratio) ** 0.5)


def test_the_ratio_of_truncated_weights_has_a_base_of_truncated_weights() -> None:
    truncated = AlgorithmConfig.model_validate({"base_ess_ratio": "auto", "ess_weights": "truncated"})
    longer = AlgorithmConfig.model_validate({"ess_weights": "truncated", "is_threshold_length": 100})
    state = batch([400] * COUNT, 0.15, 9)
    raw, short = (step(EssState(), state, each)[2] for each in (AUTO, truncated))
    assert raw is not None and short is not None and short > 1.2 * raw
    state.threshold_growth = torch.full((COUNT,), 2.0).double()  # 400 tokens at L_ref = 100
    grown = step(EssState(), state, longer)[2]
    assert grown is not None and raw < grown < short
    state.log_ratio[:] = torch.tensor([6.0, *[0.0] * (COUNT - 1)])  # weights at most 64, and 63 of 1
    assert batch_ess_ratio(state, "truncated", 8.0) == pytest.approx((64 + 63) ** 2 / (64**2 + 63) / COUNT)


def test_a_step_that_is_not_taken_leaves_no_trace() -> None:
    ess = warmed_up([40] * COUNT, 0.05)
    before = dataclasses.asdict(ess)
    seen = ess.observed(batch([40] * COUNT, 0.5, 9))
    assert seen != ess and dataclasses.asdict(ess) == before
    broken = batch([40] * COUNT, 0.5, 9)
    broken.noise_squares[3] = torch.nan
    assert ess.observed(broken) == ess


def through_a_manifest(ess: EssState) -> EssState:
    saved: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(ess)))
    return EssState(**saved)


def test_a_resume_goes_on_to_the_bit() -> None:
    whole = again = EssState()
    for seed in range(12):
        state = batch([30 + 7 * seed] * COUNT, 0.05 + 0.01 * seed, seed, current=1.0 if seed < 6 else 0.3, lag=0.1)
        again = through_a_manifest(again)
        (whole, *said), (again, *says) = step(whole, state), step(again, state)
        assert says == said and again == whole


def test_a_manifest_from_before_is_read() -> None:
    """Without noise in it: the median is the base until tokens say more."""
    ess = EssState(**{"previous_ratio": 0.5, "first_ratios": [0.3, 0.4, 0.5, 0.6, 0.7]})
    assert ess.base(None, AUTO) == 0.5
    _, _, on_policy = step(ess, batch([400] * COUNT, 0.05, 9))
    assert on_policy == pytest.approx(noise_ess_ratio(torch.full((COUNT,), 1.0)), rel=0.05)


LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "single": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "cp2": (2, {"context": 2}),
    "dp2": (2, {}),
}


def on_policy(one: Batch) -> Batch:
    """Every token was sampled by the version that the step starts from."""

    def young(t: Trajectory) -> Trajectory:
        spans = (VersionSpan(t.prompt_length, len(t.tokens), PolicyVersion(1, one.step)),)
        return dataclasses.replace(t, turns=(dataclasses.replace(t.turns[0], spans=spans),))

    groups = [dataclasses.replace(g, trajectories=tuple(map(young, g.trajectories))) for g in one.groups]
    return dataclasses.replace(one, groups=tuple(groups))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", matrix(LAYOUTS, ("single",)))
def test_the_base_of_seven_steps(name: str, tmp_path: Path) -> None:
    """Five on-policy batches and two of a mixed age, at a learning rate that moves nothing: scales and on-policy ratios
    from fp64 log-probs of all tokens, the moments by plain sums."""
    ranks, parallel = LAYOUTS[name]
    model = make_model_folder(tmp_path / "model", layers=2)
    batches = [make_batch(model, number) for number in range(7)]
    batches = [on_policy(one) if one.step < 5 else one for one in batches]
    keys = {"algorithm": {"base_ess_ratio": "auto"}, "optimizer": {"lr": 1e-30}}
    config = make_config(model, ranks, parallel=parallel, **keys)
    (outcome,) = run_world(ranks, "learner.run_layouts:one_step_each", {"cases": [(config, batches)]})
    seen: list[float] = []
    inflations: list[float] = []
    for one, result in zip(batches, outcome["results"], strict=True):
        logs = [(s.logp - s.mu).detach() for s in Policy(model, one).samples]
        trajectories = [t for group in one.groups for t in group.trajectories]
        young = [log[t.sampled_by(one.step)[t.loss_mask]] for log, t in zip(logs, trajectories, strict=True)]
        seen += torch.cat(young).tolist()
        lengths = torch.tensor([len(log) for log in logs]).double()
        kappa = statistics.median(inflations) if inflations else 1.0
        expected = noise_ess_ratio(lengths * statistics.pvariance(seen) * kappa)
        metrics, ratio = result.metrics, ess_ratio(torch.stack([log.sum() for log in logs]))
        assert metrics["ess/ratio_on_policy"] == pytest.approx(expected, rel=1e-4), one.step
        scale = 1.0 if one.step < 5 else min(1.0, ratio / expected) ** 0.5
        assert metrics["ess/lr_scale"] == pytest.approx(scale, rel=1e-4), one.step
        if one.step < 5:
            variance = statistics.pvariance(torch.cat(logs).tolist())
            inflations.append(noise_inflation(ratio, lengths * variance))
