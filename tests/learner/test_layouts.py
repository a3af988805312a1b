"""Every layout takes the same step as an fp64 oracle with materialised per-trajectory gradients.

Layouts that share a world size share one launch, which stays up: starting Megatron's processes costs more than a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.messages import assert_names
from tests.slow import Made, matrix
from vcpo_megatron.algorithm.noise import noise_ess_ratio
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.observability.metrics import METRICS
from vcpo_megatron.types import Batch

from .scenarios import Oracle, make_batch, make_config, make_model_folder, oracle_step, with_record
from .world import run_world

ONE_STEP = "learner.run_layouts:one_step_each"


@dataclass(frozen=True)
class Case:
    """A layout: ranks, the model's family, and sections of the configuration."""

    ranks: int
    parallel: dict[str, Any] = field(default_factory=dict)
    family: str = "qwen2"
    tied: bool = False
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)


SP: dict[str, Any] = {"tensor": 2, "sequence_parallel": True}
FULL, SELECTIVE = ({"model": {"recompute": kind}} for kind in ("full", "selective"))
DISTRIBUTED = {"optimizer": {"distributed": True}}
OVERLAPPED = {"optimizer": {"distributed": True, "overlap_grad_reduce": True}}
BOUNDED = {"algorithm": {"method": "vcpo_plus"}}  # its step has more to remember
DEFERRED, TWO_PASS = ({"algorithm": {"opob_mode": mode}} for mode in ("deferred", "two_pass"))
LAYOUTS: dict[str, Case] = {
    "single": Case(1),
    "single tied": Case(1, tied=True),
    "single qk-norm": Case(1, family="qwen3"),
    "single llama": Case(1, family="llama"),
    "single full recompute": Case(1, sections=FULL),
    "single selective recompute": Case(1, sections=SELECTIVE),
    "tp2": Case(2, {"tensor": 2}),
    "tp2 tied": Case(2, {"tensor": 2}, tied=True),
    "tp2 qk-norm": Case(2, {"tensor": 2}, "qwen3"),
    "tp2 sp": Case(2, SP),
    "tp2 sp tied": Case(2, SP, tied=True),
    "tp2 sp qk-norm full recompute": Case(2, SP, "qwen3", sections=FULL),
    "pp2": Case(2, {"pipeline": 2}),
    "pp2 tied": Case(2, {"pipeline": 2}, tied=True),
    "pp2 full recompute": Case(2, {"pipeline": 2}, sections=FULL),
    "pp2 vpp2": Case(2, {"pipeline": 2, "virtual_pipeline": 2}),
    "pp2 vpp2 tied": Case(2, {"pipeline": 2, "virtual_pipeline": 2}, tied=True, sections=FULL),
    "dp2": Case(2),
    "dp2 distributed": Case(2, sections=DISTRIBUTED),
    "dp2 overlapped": Case(2, sections=OVERLAPPED),
    "cp2": Case(2, {"context": 2}),
    "cp2 tied": Case(2, {"context": 2}, tied=True),
    "cp2 qk-norm distributed": Case(2, {"context": 2}, "qwen3", sections=DISTRIBUTED),
    "dp2 overlapped deferred": Case(2, sections={**OVERLAPPED, **DEFERRED}),
    "dp2 overlapped two-pass": Case(2, sections={**OVERLAPPED, **TWO_PASS}),
    "tp2 sp tied deferred": Case(2, SP, tied=True, sections=DEFERRED),
    "pp2 vpp2 tied deferred": Case(2, {"pipeline": 2, "virtual_pipeline": 2}, tied=True, sections=DEFERRED),
    "pp2 vpp2 two-pass": Case(2, {"pipeline": 2, "virtual_pipeline": 2}, sections=TWO_PASS),
    "cp2 qk-norm deferred": Case(2, {"context": 2}, "qwen3", sections=DEFERRED),
    "cp2 tied two-pass": Case(2, {"context": 2}, tied=True, sections=TWO_PASS),
    "moe ep2 deferred": Case(2, {"expert": 2}, "moe", sections=DEFERRED),
    "moe cp2 ep2 deferred": Case(2, {"context": 2, "expert": 2}, "moe", sections=DEFERRED),
    "moe tp2 sp etp2 two-pass": Case(2, {**SP, "expert_tensor": 2}, "moe", sections=TWO_PASS),
    "moe": Case(1, family="moe"),
    "shared experts": Case(1, family="shared"),
    "shared experts tp2 sp ep2": Case(2, {**SP, "expert": 2}, "shared"),
    "windowed": Case(1, family="windowed"),
    "windowed tp2 sp": Case(2, SP, "windowed"),
    "windowed pp2 deferred": Case(2, {"pipeline": 2}, "windowed", sections=DEFERRED),
    "windowed cp2": Case(2, {"context": 2}, "windowed"),
    "latent": Case(1, family="latent"),
    "latent deferred selective recompute": Case(1, family="latent", sections={**DEFERRED, **SELECTIVE}),
    "latent tp2 sp ep2": Case(2, {**SP, "expert": 2}, "latent"),
    "latent tp2 sp etp2 full recompute": Case(2, {**SP, "expert_tensor": 2}, "latent", sections=FULL),
    "latent pp2 two-pass": Case(2, {"pipeline": 2}, "latent", sections=TWO_PASS),
    "latent cp2 ep2": Case(2, {"context": 2, "expert": 2}, "latent"),
    "latent tp2 sp pp2 vpp2 ep2": Case(4, {**SP, "pipeline": 2, "virtual_pipeline": 2, "expert": 2}, "latent"),
    "moe ep2": Case(2, {"expert": 2}, "moe"),
    "moe ep2 allgather": Case(2, {"expert": 2, "expert_dispatcher": "allgather"}, "moe"),
    "moe tp2 sp ep2": Case(2, {**SP, "expert": 2}, "moe"),
    "moe tp2 sp etp2": Case(2, {**SP, "expert_tensor": 2}, "moe"),
    "moe tp2 sp etp2 allgather": Case(2, {**SP, "expert_tensor": 2, "expert_dispatcher": "allgather"}, "moe"),
    "moe cp2": Case(2, {"context": 2}, "moe"),
    "moe cp2 ep2 full recompute": Case(2, {"context": 2, "expert": 2}, "moe", sections=FULL),
    "moe ep2 dp4 distributed": Case(4, {"expert": 2}, "moe", sections=DISTRIBUTED),
    "moe ep4": Case(4, {"expert": 4}, "moe"),
    "moe pp2 ep2": Case(4, {"pipeline": 2, "expert": 2}, "moe"),
    "moe tp2 sp etp2 ep2": Case(4, {**SP, "expert_tensor": 2, "expert": 2}, "moe"),
    "moe tp2 sp cp2 ep2": Case(4, {**SP, "context": 2, "expert": 2}, "moe"),
    "moe pp2 vpp2 ep2": Case(4, {"pipeline": 2, "virtual_pipeline": 2, "expert": 2}, "moe"),
    "tp2 pp2": Case(4, {"tensor": 2, "pipeline": 2}),
    "tp2 dp2": Case(4, {"tensor": 2}, "qwen3"),
    "pp2 dp2": Case(4, {"pipeline": 2}, "llama"),
    "pp4": Case(4, {"pipeline": 4}),
    "tp2 sp dp2 distributed": Case(4, SP, "qwen3", sections=DISTRIBUTED),
    "tp2 sp pp2 vpp2 tied": Case(4, {**SP, "pipeline": 2, "virtual_pipeline": 2}, tied=True),
    "tp2 cp2": Case(4, {"tensor": 2, "context": 2}),
    "tp2 sp cp2": Case(4, {**SP, "context": 2}, "qwen3"),
    "pp2 cp2 tied": Case(4, {"pipeline": 2, "context": 2}, tied=True),
}


#: One of each kind of parallelism and of layer, and of what is most its own beside it; the other rows are slow.
DEFAULT = (
    "single",
    "single qk-norm",
    "shared experts",
    "windowed",
    "latent",
    "tp2",
    "tp2 sp tied",
    "pp2",
    "pp2 vpp2 tied",
    "dp2",
    "dp2 overlapped deferred",
    "cp2",
    "moe ep2",
    "moe ep2 allgather",
    "moe tp2 sp etp2",
    "moe cp2",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    root = tmp_path_factory.mktemp("models")
    return Made(lambda kind: make_model_folder(root / f"{kind[0]}{kind[1]}", kind[0], tied=kind[1]))


@pytest.fixture(scope="module")
def batches(models: dict[tuple[str, bool], Path]) -> dict[tuple[str, bool], Batch]:
    return Made(lambda kind: make_batch(models[kind]))


@pytest.fixture(scope="module")
def oracles(models: dict[tuple[str, bool], Path], batches: dict[tuple[str, bool], Batch]) -> dict[Any, Oracle]:
    """The oracle's step for each model."""
    return Made(lambda kind: oracle_step(models[kind], batches[kind], make_config(models[kind], 1)))


@pytest.fixture(scope="module")
def outcomes(models: dict[tuple[str, bool], Path], batches: dict[tuple[str, bool], Batch]) -> dict[str, dict[str, Any]]:
    """One step in every layout that is asked for."""

    def take(name: str) -> dict[str, Any]:
        case = LAYOUTS[name]
        kind = (case.family, case.tied)
        config = make_config(models[kind], case.ranks, parallel=case.parallel, **case.sections)
        (outcome,) = run_world(case.ranks, ONE_STEP, {"cases": [(config, [batches[kind]])]})
        return outcome

    return Made(take)


def test_each_kind_of_parallelism_is_in_the_default_suite() -> None:
    kinds = {kind for name in DEFAULT for kind, size in LAYOUTS[name].parallel.items() if size == 2}
    assert {"tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor"} <= kinds
    assert any(case.ranks == 2 and not case.parallel for case in (LAYOUTS[name] for name in DEFAULT))  # data


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", matrix(LAYOUTS, DEFAULT))
def test_step_equals_the_oracle(name: str, outcomes: dict[str, dict[str, Any]], oracles: dict[Any, Oracle]) -> None:
    assert_equals_the_oracle(outcomes[name], oracles[LAYOUTS[name].family, LAYOUTS[name].tied])


def assert_equals_the_oracle(outcome: dict[str, Any], oracle: Oracle, *, recorded: bool = False) -> None:
    """Loss, log ratios, norms, baselines, ESS, learning rate, gradients and parameters after the last step.
    ``recorded``: the log ratios hold no mismatch whose ESS could be expected."""
    result = outcome["results"][-1]
    rows, metrics = result.trajectories, result.metrics
    norms = torch.tensor([row.grad_norm for row in rows], dtype=torch.float64)
    has_norm = ~norms.isnan()
    assert has_norm.tolist() == [True] * 8 + [False] * 4 + [True] * 4  # group 2 has equal rewards
    assert not result.skipped
    torch.testing.assert_close(
        torch.tensor([row.log_ratio for row in rows], dtype=torch.float64), oracle.log_ratios, rtol=0, atol=2e-5
    )
    torch.testing.assert_close(norms[has_norm], oracle.norms[has_norm], rtol=5e-6, atol=0)
    torch.testing.assert_close(
        torch.tensor([row.baseline for row in rows], dtype=torch.float64), oracle.baselines, rtol=0, atol=2e-5
    )
    assert metrics["mismatch/tokens"] == len(oracle.mismatch)
    assert metrics["mismatch/mean"] == pytest.approx(float(oracle.mismatch.mean()), abs=1e-5)
    assert metrics["mismatch/max"] == pytest.approx(float(oracle.mismatch.max()), abs=2e-5)
    assert ("ess/ratio_on_policy" in metrics) is not recorded
    if not recorded:
        on_policy = noise_ess_ratio(oracle.lengths * oracle.noise.var(correction=0))
        assert metrics["ess/ratio_on_policy"] == pytest.approx(on_policy, rel=1e-4)
    whole = oracle.log_ratios + oracle.drift
    assert metrics["kl/behavior_trajectory"] == pytest.approx(-float(whole.mean()), abs=2e-5)
    # A sum of terms of both signs of about 1, each with its baseline: it can be no nearer than they are.
    assert metrics["loss"] == pytest.approx(oracle.loss, rel=0, abs=2e-5)
    assert metrics["ess/ratio"] == pytest.approx(oracle.ess, rel=5e-6)
    assert metrics["lr/effective"] == pytest.approx(oracle.learning_rate, rel=5e-6)
    assert metrics["grad_norm/total"] == pytest.approx(oracle.total_norm, rel=1e-5)
    assert metrics["entropy"] == pytest.approx(oracle.entropy, rel=1e-5)
    assert metrics["baseline/fallbacks"] == 0
    assert metrics.keys() <= METRICS.keys()
    largest = max(float(g.abs().max()) for g in oracle.gradients.values())
    for key, gradient in oracle.gradients.items():
        if key in outcome["gradients"]:
            torch.testing.assert_close(
                outcome["gradients"][key].double(),
                gradient,
                rtol=0,
                atol=1e-5 * largest,
                msg=lambda m, k=key: f"{k}: {m}",
            )
    assert set(oracle.parameters) - set(outcome["parameters"]) <= {"lm_head.weight"}  # tied: one tensor
    for key, parameter in outcome["parameters"].items():
        # Adam's first step moves by lr g / (|g| + eps): the noise of g, 1e-5 of the largest, is worth lr / eps of it
        difference = (parameter.double() - oracle.parameters[key]).abs()
        assert float(difference.max()) < 1e-4 * largest and float(difference.mean()) < 1e-6, key


RECORDED: dict[str, Case] = {
    "single": Case(1),
    "single deferred": Case(1, sections=DEFERRED),
    "single two-pass": Case(1, sections=TWO_PASS),
    "tp2": Case(2, {"tensor": 2}),
    "tp2 sp tied": Case(2, SP, tied=True),
    "pp2": Case(2, {"pipeline": 2}),
    "pp2 vpp2 tied deferred": Case(2, {"pipeline": 2, "virtual_pipeline": 2}, tied=True, sections=DEFERRED),
    "cp2": Case(2, {"context": 2}),
    "cp2 tied two-pass": Case(2, {"context": 2}, tied=True, sections=TWO_PASS),
    "dp2": Case(2),
    "dp2 overlapped deferred": Case(2, sections={**OVERLAPPED, **DEFERRED}),
    "moe ep2": Case(2, {"expert": 2}, "moe"),
    "moe ep2 allgather": Case(2, {"expert": 2, "expert_dispatcher": "allgather"}, "moe"),
    "moe cp2 ep2": Case(2, {"context": 2, "expert": 2}, "moe"),
}
#: So low that many tokens of the batch are beyond it.
RECORD = {"mismatch": "recorded", "mismatch_threshold": 1.05}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", matrix(RECORDED, ("single",)))
def test_a_step_with_recorded_logprobs_equals_the_oracle(
    name: str, models: dict[tuple[str, bool], Path], batches: dict[tuple[str, bool], Batch]
) -> None:
    """l counts from what the learner recorded, and tokens carry the truncated ratio of it to the behaviour; and what
    the learner records is what the oracle's model says."""
    case = RECORDED[name]
    model, batch = models[case.family, case.tied], with_record(batches[case.family, case.tied])
    algorithm = {**case.sections.get("algorithm", {}), **RECORD}
    config = make_config(model, case.ranks, parallel=case.parallel, **{**case.sections, "algorithm": algorithm})
    (outcome,) = run_world(case.ranks, ONE_STEP, {"cases": [(config, [batch])]})
    oracle = oracle_step(model, batch, config)
    assert_equals_the_oracle(outcome, oracle, recorded=True)
    metrics = outcome["results"][0].metrics
    assert metrics["lag/spread"] == pytest.approx(float(oracle.log_ratios.std(correction=0)), rel=1e-5)
    assert metrics["mismatch/spread"] == pytest.approx(float(oracle.drift.std(correction=0)), rel=1e-5)
    whole = float((oracle.log_ratios + oracle.drift).sum())
    assert metrics["kl/behavior"] == pytest.approx(-whole / len(oracle.logprobs), rel=1e-4)
    assert 0.2 < float(oracle.drift.std()) < 2 and 0.2 < float(oracle.log_ratios.std()) < 2
    sampled = np.concatenate([t.loss_mask for group in batch.groups for t in group.trajectories])
    assert outcome["recorded"].dtype == np.float32 and (outcome["recorded"][~sampled] == 0).all()
    np.testing.assert_allclose(outcome["recorded"][sampled], oracle.logprobs.numpy(), rtol=0, atol=2e-5)


#: CP ranks by layout.
PADDED = {"single": 1, "tp2": 1, "pp2": 1, "dp2": 1, "cp2": 2, "tp2 cp2": 2, "pp2 cp2 tied": 2}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", matrix(PADDED, set(PADDED) & set(DEFAULT)))
def test_padding_is_counted_once(
    name: str, outcomes: dict[str, dict[str, Any]], batches: dict[tuple[str, bool], Batch]
) -> None:
    """By one of the ranks that share a pack: 2 CP tokens divide every trajectory, and nothing else is padded."""
    costs = [len(t.tokens) - 1 for group in batches["qwen2", False].groups for t in group.trajectories]
    ranks = PADDED[name]
    expected = sum(-cost % (2 * ranks) for cost in costs) if ranks > 1 else 0
    assert outcomes[name]["results"][0].metrics["tokens/padded"] == expected


@pytest.mark.timeout(300)
def test_replicas_and_batches_without_a_gradient(models: dict[tuple[str, bool], Path]) -> None:
    """Two groups on two replicas, one of them of equal rewards; and a batch of nothing else: the weights only decay."""
    model = models["qwen2", False]
    batch = make_batch(model)
    two = replace(batch, groups=batch.groups[1:3])
    members = [
        replace(group, trajectories=tuple(replace(t, reward=1.0) for t in group.trajectories)) for group in batch.groups
    ]
    equal = replace(batch, groups=tuple(members))
    vpp = {"pipeline": 2, "virtual_pipeline": 2}
    unclipped = {"optimizer": {**OVERLAPPED["optimizer"], "clip_grad": 0.0}, **DEFERRED}
    layouts: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, OVERLAPPED), ({}, unclipped), (vpp, {})]
    cases = [
        (make_config(model, 2, parallel=parallel, **sections), [b])
        for b in (two, equal)
        for parallel, sections in layouts
    ]
    outcomes = run_world(2, ONE_STEP, {"cases": cases}, timeout_s=250)
    for (config, (b,)), outcome in zip(cases, outcomes, strict=True):
        oracle, metrics = oracle_step(model, b, config), outcome["results"][0].metrics
        assert not outcome["results"][0].skipped
        assert metrics["lr/effective"] == pytest.approx(oracle.learning_rate, rel=5e-6)
        assert metrics["grad_norm/total"] == pytest.approx(oracle.total_norm, rel=1e-5)
        assert (oracle.total_norm > 0) is (b is two)
        for key, parameter in outcome["parameters"].items():
            assert float((parameter.double() - oracle.parameters[key]).abs().max()) < 1e-5, key


FOREIGN = {
    "dp2": Case(2),
    "dp2 tied qk-norm deferred": Case(2, family="qwen3", tied=True, sections=DEFERRED),
    "dp2 two-pass": Case(2, sections=TWO_PASS),
    "dp2 full recompute": Case(2, sections=FULL),
    "pp2": Case(2, {"pipeline": 2}),
    "pp2 vpp2 deferred": Case(2, {"pipeline": 2, "virtual_pipeline": 2}, sections=DEFERRED),
}
FOREIGN_REFUSED = [({"tensor": 2}, "parallel.tensor = 2"), ({"context": 2}, "parallel.context = 2")]
WITH_FOREIGN_NORMS = "learner.run_layouts:with_foreign_norms"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", matrix(FOREIGN, ("dp2", "pp2 vpp2 deferred")))
def test_a_layer_of_an_unknown_kind_takes_one_trajectory_a_micro_batch(
    name: str,
    models: dict[tuple[str, bool], Path],
    batches: dict[tuple[str, bool], Batch],
    oracles: dict[tuple[str, bool], Oracle],
) -> None:
    """Norms of a class that the learner does not know: the same step, said in the log."""
    case = FOREIGN[name]
    kind = (case.family, case.tied)
    config = make_config(models[kind], 2, parallel=case.parallel, **case.sections)
    found = run_world(2, WITH_FOREIGN_NORMS, {"cases": [(config, [batches[kind]])], "refused": []})
    assert found["said"].count("one trajectory a micro-batch") == 1
    assert_names(found["said"], "one trajectory a micro-batch", "gradients of 0.decoder.")
    (outcome,) = found["outcomes"]
    assert_equals_the_oracle(outcome, oracles[kind])


@pytest.mark.timeout(300)
def test_where_it_cannot_be_so_it_is_refused(models: dict[tuple[str, bool], Path]) -> None:
    refused = [make_config(models["qwen2", False], 2, parallel=parallel) for parallel, _ in FOREIGN_REFUSED]
    found = run_world(2, WITH_FOREIGN_NORMS, {"cases": [], "refused": refused})
    for (_, reason), message in zip(FOREIGN_REFUSED, found["refusals"], strict=True):
        assert message.startswith("no exact per-trajectory gradient for 0.decoder.") and reason in message


@pytest.mark.timeout(300)
def test_weights_beyond_fp32_skip_the_step(models: dict[tuple[str, bool], Path]) -> None:
    """exp(100) is finite where weights are formed and infinite in an fp32 gradient, which nothing but the check of
    gradients sees: log ratios, norms and ESS are finite."""
    model = models["qwen2", False]
    far, near = make_batch(model, shift=100.0), make_batch(model, 1)
    layouts: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"pipeline": 2}, {}),
        ({}, {"opob_mode": "deferred"}),
        ({"tensor": 2}, {"method": "vcpo_ess_only"}),
    ]
    cases = [
        (make_config(model, 2, parallel=parallel, algorithm={**keys, "is_threshold": float("inf")}), [far, near])
        for parallel, keys in layouts
    ]
    for (config, _), outcome in zip(cases, run_world(2, ONE_STEP, {"cases": cases}), strict=True):
        first, second = outcome["results"]
        assert first.skipped == "non-finite step" and not second.skipped
        assert max(row.log_ratio for row in first.trajectories) > 99
        assert first.metrics["ess/ratio"] == pytest.approx(oracle_step(model, far, config).ess, rel=5e-6)
        assert second.metrics["ess/ratio"] == pytest.approx(oracle_step(model, near, config).ess, rel=5e-6)


@pytest.mark.timeout(300)
def test_far_off_policy_and_skipped_steps(models: dict[tuple[str, bool], Path]) -> None:
    """Log ratios of +-2,000 do not underflow the norms or b; a NaN log-prob skips the step, and only that."""
    model = models["qwen2", False]
    near, far_up = make_batch(model), make_batch(model, shift=2000.0)
    far_down = make_batch(model, shift=-2000.0)
    broken = make_batch(model, 1)
    broken.groups[0].trajectories[1].behavior_logprobs[-1] = float("nan")
    cases = []
    for parallel in ({"tensor": 2}, {"pipeline": 2}):
        config = make_config(model, 2, parallel=parallel)
        cases += [(config, [far_up]), (config, [far_down]), (config, [broken, near])]
    outcomes = run_world(2, ONE_STEP, {"cases": cases})
    for (config, batches), outcome in zip(cases, outcomes, strict=True):
        last = batches[-1]
        oracle, result = oracle_step(model, last, config), outcome["results"][-1]
        norms = torch.tensor([row.grad_norm for row in result.trajectories], dtype=torch.float64)
        kept = ~norms.isnan()
        torch.testing.assert_close(norms[kept], oracle.norms[kept], rtol=5e-6, atol=0)
        baselines = torch.tensor([row.baseline for row in result.trajectories], dtype=torch.float64)
        torch.testing.assert_close(baselines, oracle.baselines, rtol=0, atol=2e-5)
        assert 1 / 16 <= result.metrics["ess/ratio"] <= 1
        if len(batches) == 2:
            first = outcome["results"][0]
            assert first.skipped == "non-finite step" and first.metrics["step/skipped"] == 1
            assert result.metrics["lr/effective"] == pytest.approx(oracle.learning_rate, rel=5e-6)  # untouched by it


CHECKPOINTS: dict[str, tuple[Case, list[Case]]] = {
    "tp2": (
        Case(2, {"tensor": 2}, sections=BOUNDED),
        [
            Case(2, {"tensor": 2}, sections=BOUNDED),
            Case(2, {"pipeline": 2}, sections=BOUNDED),
            Case(2, sections=BOUNDED),
            Case(1, sections=BOUNDED),
        ],
    ),
    "dp2 distributed": (
        Case(2, sections=DISTRIBUTED),
        [
            Case(2, sections=DISTRIBUTED),
            Case(2, SP, sections=DISTRIBUTED),
            Case(2, {"pipeline": 2, "virtual_pipeline": 2}, sections=OVERLAPPED),
            Case(2, {"context": 2}, sections=DISTRIBUTED),
        ],
    ),
    "moe ep2 distributed": (
        Case(2, {"expert": 2}, "moe", sections=DISTRIBUTED),
        [Case(2, {"expert": 2, **more}, "moe", sections=DISTRIBUTED) for more in ({}, SP)],
    ),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", matrix(CHECKPOINTS, ("tp2",)))
def test_checkpoint_is_free_of_the_layout(name: str, models: dict[tuple[str, bool], Path], tmp_path: Path) -> None:
    """Saved under one layout and read under others: the next step is the same; bit for bit under the same one."""
    saved_by, loaded_by = CHECKPOINTS[name]
    model = models[saved_by.family, False]
    batches = [make_batch(model, 0), make_batch(model, 1)]

    def config(case: Case) -> RunConfig:
        return make_config(model, case.ranks, parallel=case.parallel, **case.sections)

    arguments = {"batches": batches, "run_dir": str(tmp_path / "run")}
    here = [case for case in loaded_by if case.ranks == saved_by.ranks]
    alone = [case for case in loaded_by if case.ranks == 1]
    both = {"saving": config(saved_by), "loading": [config(case) for case in here]}
    saved, *loaded = run_world(2, "learner.run_layouts:save_and_load", {**arguments, **both}, timeout_s=250)
    if alone:
        lone = {"loading": [config(case) for case in alone]}
        loaded += run_world(1, "learner.run_layouts:load_and_continue", {**arguments, **lone})
    for case, again in zip([*here, *alone], loaded, strict=True):
        assert again["steps"] == saved["steps"] == 3
        bounds = [metric for metric in saved["result"].metrics if metric.startswith("bound/")]
        assert len(bounds) == (4 if saved_by.sections == BOUNDED else 0)
        for metric in ("loss", "ess/ratio", "grad_norm/total", "lr/effective", *bounds):
            expected = saved["result"].metrics[metric]
            assert again["result"].metrics[metric] == pytest.approx(expected, rel=1e-4), (case, metric)
        # of the tokens of both steps: what those of the first said is in the checkpoint
        noise = [outcome["result"].metrics["ess/ratio_on_policy"] for outcome in (again, saved)]
        assert noise[0] == noise[1] if case == saved_by else noise[0] == pytest.approx(noise[1], rel=1e-5), case
        for key, parameter in again["parameters"].items():
            difference = (parameter - saved["parameters"][key]).abs().max()
            assert difference == 0 if case == saved_by else difference < 1e-3, (case, key)
        # random number generators belong to the ranks of a layout
        assert bool((again["random"] == saved["random"]).all()) is (case == saved_by), case


@pytest.mark.timeout(300)
def test_a_checkpoint_with_experts_apart_is_refused_without_and_the_reverse(
    models: dict[tuple[str, bool], Path], tmp_path: Path
) -> None:
    """Megatron keeps one optimizer or two, in different structures: the learner says so before it reads any."""
    model = models["moe", False]
    apart, together = (make_config(model, 2, parallel=p, **DISTRIBUTED) for p in ({"expert": 2}, {}))
    arguments = {
        "pairs": [(apart, together), (together, apart)],
        "batches": [make_batch(model, n) for n in (0, 1)],
        "run_dir": str(tmp_path),
    }
    with_experts, without = run_world(2, "learner.run_layouts:refusals", arguments, timeout_s=250)
    assert_names(with_experts, "parallel.expert > 1", "True in the checkpoint", "False now")
    assert_names(without, "parallel.expert > 1", "False in the checkpoint", "True now")
    assert str(tmp_path / "0") in with_experts and str(tmp_path / "1") in without


BF16 = {"model": {"dtype": "bfloat16"}}
BF16_LAYOUTS = [
    Case(1, sections=BF16),
    Case(1, tied=True, sections=BF16),
    Case(2, SP, sections=BF16),
    Case(2, {"pipeline": 2}, sections=BF16),
    Case(2, sections={**BF16, **DISTRIBUTED}),
]


@pytest.mark.timeout(600)
def test_bfloat16_with_fp32_gradients(tmp_path: Path) -> None:
    """Activations in bfloat16 (8 bits), sums of gradients in fp32, against the fp64 oracle of the same weights.

    Tolerances are what 8 bits through 4 layers leave (seen alone: log ratios 0.08, norms 0.5 %, gradients 5 %).
    Layouts agree with one another no better than that, since their activations are rounded at different places.
    """
    models = {tied: make_model_folder(tmp_path / f"model{tied}", tied=tied, rounded=True) for tied in (False, True)}
    batches = {tied: make_batch(model) for tied, model in models.items()}
    configs = [make_config(models[c.tied], c.ranks, parallel=c.parallel, **c.sections) for c in BF16_LAYOUTS]
    oracles = {tied: oracle_step(models[tied], batches[tied], configs[0]) for tied in (False, True)}
    outcomes = []
    for ranks in (1, 2):
        pairs = zip(BF16_LAYOUTS, configs, strict=True)
        cases = [(config, [batches[case.tied]]) for case, config in pairs if case.ranks == ranks]
        outcomes += run_world(ranks, ONE_STEP, {"cases": cases}, timeout_s=250)
    for case, outcome in zip(BF16_LAYOUTS, outcomes, strict=True):
        oracle = oracles[case.tied]
        rows = outcome["results"][-1].trajectories
        ratios = torch.tensor([row.log_ratio for row in rows], dtype=torch.float64)
        torch.testing.assert_close(ratios, oracle.log_ratios, rtol=0, atol=0.3)
        norms = torch.tensor([row.grad_norm for row in rows], dtype=torch.float64)
        torch.testing.assert_close(norms[~norms.isnan()], oracle.norms[~norms.isnan()], rtol=0.03, atol=0)
        for key, gradient in oracle.gradients.items():
            if key == "lm_head.weight" and case.tied:
                continue  # one tensor with the embedding
            found = outcome["gradients"][key]
            assert found.dtype is torch.float32
            assert float((found.double() - gradient).norm() / gradient.norm()) < 0.15, key
