"""Weights of any size: a trajectory that outweighs its group, gradients at both ends of fp32, weights that vanish."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.slow import matrix
from vcpo_megatron.types import Batch

from ..scenarios import make_batch, make_config, make_model_folder, oracle_step
from ..world import run_world
from .test_methods import assert_gradients

ONE_STEP = "learner.run_layouts:one_step_each"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_model_folder(root / family, family) for family in ("qwen2", "moe")}


def with_log_ratios(
    batch: Batch, log_ratios: Sequence[float], rewards: Sequence[float], *, groups: Sequence[int] = (0, 1, 3)
) -> Batch:
    """``batch`` with l and R of the members of its ``groups``; group 2, whose rewards are equal, is left as it is."""
    found = []
    for group in batch.groups:
        members = []
        for t, log_ratio, reward in zip(group.trajectories, log_ratios, rewards, strict=True):
            behavior = t.behavior_logprobs.copy()
            behavior[int(t.loss_mask.nonzero()[0][0])] -= log_ratio
            members.append(replace(t, behavior_logprobs=behavior, reward=reward))
        found.append(replace(group, trajectories=tuple(members)) if group.group_id in groups else group)
    return replace(batch, groups=tuple(found))


@dataclass(frozen=True)
class Dominated:
    """l and R of each group's trajectories, the truncation, and a layout."""

    log_ratios: tuple[float, ...]
    threshold: float
    rewards: tuple[float, ...] = (1.0, 0.0, 1.0, 0.0)
    ranks: int = 1
    parallel: dict[str, Any] = field(default_factory=dict)
    family: str = "qwen2"
    pack: int = 40
    mode: str = "accumulate"


FAR = (20.0, 0.0, -1.0, 0.5)
INF = math.inf
DOMINATED: dict[str, Dominated] = {
    "untruncated": Dominated(FAR, INF),
    "untruncated, whole groups": Dominated(FAR, INF, pack=1000),
    "untruncated deferred": Dominated(FAR, INF, mode="deferred"),
    "at a million": Dominated(FAR, 1e6),
    "at the default": Dominated((1.0, -13.0, -13.5, -12.7), 8.0),
    "in the last pack": Dominated((0.0, -1.0, 0.5, 20.0), INF, (0.0, 1.0, 0.0, 1.0)),
    "one after the other": Dominated((0.0, 7.0, 14.0, 21.0), INF, (0.5, 1.0, 0.0, 2.0)),
    "tp2": Dominated((-1.0, 0.0, 20.0, 0.5), INF, ranks=2, parallel={"tensor": 2}),
    "pp2": Dominated((-1.0, 0.5, 0.0, 20.0), INF, ranks=2, parallel={"pipeline": 2}),
    "dp2": Dominated((-11.0, 3.0, -11.5, -10.7), 8.0, ranks=2),
    "pp2 vpp2": Dominated((0.0, 7.0, 14.0, 21.0), INF, (0.5, 1.0, 0.0, 2.0), 2, {"pipeline": 2, "virtual_pipeline": 2}),
    "cp2": Dominated((0.0, 7.0, 14.0, 21.0), INF, (0.5, 1.0, 0.0, 2.0), 2, {"context": 2}),
    "ep2": Dominated((0.0, 7.0, 14.0, 21.0), INF, (0.5, 1.0, 0.0, 2.0), 2, {"expert": 2}, "moe"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    matrix(DOMINATED, ("untruncated", "at a million", "at the default", "one after the other", "tp2", "pp2", "dp2")),
)
def test_one_trajectory_that_outweighs_its_group(name: str, models: dict[str, Path]) -> None:
    """b_g is that trajectory's reward, to rounding; what the others say of it must not be lost in fp32."""
    case = DOMINATED[name]
    model = models[case.family]
    batch = with_log_ratios(make_batch(model, spread=0.0), case.log_ratios, case.rewards)
    config = make_config(
        model,
        case.ranks,
        parallel=case.parallel,
        train={"max_pack_tokens": case.pack},
        algorithm={"is_threshold": case.threshold, "opob_mode": case.mode},
    )
    (outcome,) = run_world(case.ranks, ONE_STEP, {"cases": [(config, [batch])]})
    assert not outcome["results"][-1].skipped
    assert_gradients(outcome, oracle_step(model, batch, config).gradients)


def shifted(batch: Batch, by: float, *, tokens: bool = False) -> Batch:
    """``batch`` with every log ratio moved: of every sampled token, or of each trajectory by its first one."""
    groups = []
    for group in batch.groups:
        members = []
        for t in group.trajectories:
            behavior, sampled = t.behavior_logprobs.copy(), t.loss_mask.nonzero()[0]
            behavior[sampled if tokens else sampled[:1]] -= by
            members.append(replace(t, behavior_logprobs=behavior))
        groups.append(replace(group, trajectories=tuple(members)))
    return replace(batch, groups=tuple(groups))


HUGE = (50.0, 50.1, 49.9, 50.0)
UNTRUNCATED = {"algorithm": {"is_threshold": INF}}
PLAIN = {"algorithm": {"method": "vcpo_ess_only", "is_threshold": INF}}
#: name -> ranks, parallel and other sections of the configuration
NORMS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "clipped": (1, {}, UNTRUNCATED),
    "unclipped": (1, {}, {**UNTRUNCATED, "optimizer": {"clip_grad": 0.0}}),
    "tp2 unclipped": (2, {"tensor": 2}, {**UNTRUNCATED, "optimizer": {"clip_grad": 0.0}}),
    "pp2 plain": (2, {"pipeline": 2}, PLAIN),
    "dp2 distributed": (2, {}, {**UNTRUNCATED, "optimizer": {"distributed": True}}),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_norm_beyond_fp32_skips_the_step(ranks: int, models: dict[str, Path]) -> None:
    """Every element is finite, the sum of their squares is not: clipped, the gradient would be 0; unclipped, Adam's
    second moment would be infinite for good. The step after it is the first one that the optimizer sees."""
    model = models["qwen2"]
    near = make_batch(model, 1)
    far = with_log_ratios(make_batch(model, spread=0.0), HUGE, (1.0, 0.0, 1.0, 0.0), groups=(1,))
    chosen = [(parallel, sections) for size, parallel, sections in NORMS.values() if size == ranks]
    cases = [(make_config(model, ranks, parallel=parallel, **sections), [far, near]) for parallel, sections in chosen]
    outcomes = run_world(ranks, ONE_STEP, {"cases": cases})
    for (config, _), outcome in zip(cases, outcomes, strict=True):
        first, second = outcome["results"]
        assert first.skipped == "non-finite step" and 1e19 < first.metrics["grad_norm/total"] < 1e30
        assert not second.skipped
        oracle = oracle_step(model, near, config)
        assert second.metrics["grad_norm/total"] == pytest.approx(oracle.total_norm, rel=1e-5)
        largest = max(float(g.abs().max()) for g in oracle.gradients.values())
        for key, parameter in outcome["parameters"].items():
            assert float((parameter.double() - oracle.parameters[key]).abs().max()) < 1e-4 * largest, key


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "parallel"), [(1, {}), (2, {"tensor": 2}), (2, {"pipeline": 2})])
def test_a_norm_whose_squares_vanish_in_fp32(ranks: int, parallel: dict[str, Any], models: dict[str, Path]) -> None:
    """All groups that have a gradient are far below the policy, beside one of equal rewards: a gradient near 1e-28."""
    model = models["qwen2"]
    batch = with_log_ratios(make_batch(model, spread=0.0), (-60.0, -60.5, -59.0, -61.0), (1.0, 0.0, 1.0, 0.0))
    config = make_config(model, ranks, parallel=parallel)
    (outcome,) = run_world(ranks, ONE_STEP, {"cases": [(config, [batch])]})
    (result,), oracle = outcome["results"], oracle_step(model, batch, config)
    assert not result.skipped and result.metrics["weight/mean"] == pytest.approx(0.25, rel=1e-5)
    assert 0 < oracle.total_norm < 1e-24
    assert result.metrics["grad_norm/total"] == pytest.approx(oracle.total_norm, rel=1e-5)
    assert_gradients(outcome, oracle.gradients)


#: name -> keys of the method; shift of every log ratio; whether of every token; the mean weight that follows, near it
VANISHED: dict[str, tuple[dict[str, Any], float, bool, float]] = {
    "far below": ({}, -400.0, False, 0.0),
    "just below the limit": ({}, -14.5, False, math.exp(-14.5)),
    "just above it": ({}, -13.0, False, math.exp(-13.0)),
    "masked above the threshold": ({"method": "mis"}, 5.0, False, 0.0),
    "of tokens": ({"is_level": "token", "opob_mode": "deferred"}, -20.0, True, math.exp(-20.0)),
    "of a surrogate's tokens": ({"method": "grpo"}, -20.0, True, math.exp(-20.0)),
    "of a few tokens only": ({"method": "grpo"}, -400.0, False, 0.9),
    "without correction": ({"method": "reinforce", "allow_uncorrected": True}, -400.0, False, 1.0),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_batch_whose_weights_all_vanish_is_skipped(ranks: int, models: dict[str, Path]) -> None:
    """Their common factor is none of ESS's business: it would let weight decay alone move the policy."""
    model = models["qwen2"]
    names = list(VANISHED) if ranks == 1 else ["far below", "of tokens"]
    cases = []
    for keys, by, tokens, _ in (VANISHED[name] for name in names):
        parallel = {"pipeline": ranks} if tokens else {}
        config = make_config(model, ranks, parallel=parallel, algorithm=keys)
        cases.append((config, [shifted(make_batch(model, spread=0.0), by, tokens=tokens)]))
    outcomes = run_world(ranks, ONE_STEP, {"cases": cases})
    for name, outcome in zip(names, outcomes, strict=True):
        (result,), expected = outcome["results"], VANISHED[name][3]
        mean = result.metrics["weight/mean"]
        assert mean == pytest.approx(expected, rel=0.2 if expected == 0.9 else 1e-4, abs=1e-100), name
        assert result.skipped == ("vanishing weights" if expected < 1e-6 else ""), name
        assert result.metrics["step/skipped"] == float(expected < 1e-6)
        moved = max(float((v - w).abs().max()) for v, w in zip(*_before_and_after(model, outcome), strict=True))
        assert (moved == 0.0) is (expected < 1e-6), name


def _before_and_after(model: Path, outcome: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    from safetensors.torch import load_file

    before = load_file(model / "model.safetensors")
    return list(before.values()), [outcome["parameters"][name] for name in before]
