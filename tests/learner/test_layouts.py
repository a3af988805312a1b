"""Every layout takes the same step as an fp64 oracle with materialised per-trajectory gradients.

Layouts that share a world size share one launch: starting Megatron's processes costs more than a step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vcpo_megatron.config.models import RunConfig

from .scenarios import Oracle, make_batch, make_config, make_model_folder, oracle_step
from .world import run_world

ONE_STEP = "learner.run_layouts:one_step_each"
#: name -> (ranks, family, tied embeddings, parallel section)
LAYOUTS: dict[str, tuple[int, str, bool, dict[str, int]]] = {
    "single": (1, "qwen2", False, {}),
    "single tied": (1, "qwen2", True, {}),
    "single qk-norm": (1, "qwen3", False, {}),
    "single llama": (1, "llama", False, {}),
    "tp2": (2, "qwen2", False, {"tensor": 2}),
    "tp2 tied": (2, "qwen2", True, {"tensor": 2}),
    "tp2 qk-norm": (2, "qwen3", False, {"tensor": 2}),
    "pp2": (2, "qwen2", False, {"pipeline": 2}),
    "dp2": (2, "qwen2", False, {}),
    "tp2 pp2": (4, "qwen2", False, {"tensor": 2, "pipeline": 2}),
    "tp2 dp2": (4, "qwen3", False, {"tensor": 2}),
    "pp2 dp2": (4, "llama", False, {"pipeline": 2}),
    "pp4": (4, "qwen2", False, {"pipeline": 4}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    root = tmp_path_factory.mktemp("models")
    kinds = sorted({(family, tied) for _, family, tied, _ in LAYOUTS.values()})
    return {kind: make_model_folder(root / f"{kind[0]}{kind[1]}", kind[0], tied=kind[1]) for kind in kinds}


@pytest.fixture(scope="module")
def outcomes(models: dict[tuple[str, bool], Path]) -> dict[str, tuple[RunConfig, dict[str, Any], Oracle]]:
    """One step in every layout, and the oracle's for its model."""
    found, oracles = {}, {}
    for ranks in sorted({layout[0] for layout in LAYOUTS.values()}):
        names = [name for name, layout in LAYOUTS.items() if layout[0] == ranks]
        cases = []
        for name in names:
            _, family, tied, parallel = LAYOUTS[name]
            model = models[family, tied]
            config, batch = make_config(model, ranks, parallel=parallel), make_batch(model)
            cases.append((config, [batch]))
            if (family, tied) not in oracles:
                oracles[family, tied] = oracle_step(model, batch, config)
        results = run_world(ranks, ONE_STEP, {"cases": cases})
        for name, (config, _), result in zip(names, cases, results, strict=True):
            found[name] = (config, result, oracles[LAYOUTS[name][1:3]])
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LAYOUTS)
def test_step_equals_the_oracle(name: str, outcomes: dict[str, tuple[RunConfig, dict[str, Any], Oracle]]) -> None:
    _, outcome, oracle = outcomes[name]
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
    assert metrics["loss"] == pytest.approx(oracle.loss, rel=2e-5)
    assert metrics["ess/ratio"] == pytest.approx(oracle.ess, rel=5e-6)
    assert metrics["lr/effective"] == pytest.approx(oracle.learning_rate, rel=5e-6)
    assert metrics["grad_norm/total"] == pytest.approx(oracle.total_norm, rel=1e-5)
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
        # Adam's first step moves by lr * sign(g): only a gradient near zero may go astray, by its noise
        difference = (parameter.double() - oracle.parameters[key]).abs()
        assert float(difference.max()) < 2e-3 and float(difference.mean()) < 1e-6, key


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


@pytest.mark.timeout(300)
def test_checkpoint_is_free_of_the_layout(models: dict[tuple[str, bool], Path], tmp_path: Path) -> None:
    """Saved under TP 2, read under TP 2, PP 2, DP 2 and alone: the next step is the same."""
    model = models["qwen2", False]
    batches = [make_batch(model, 0), make_batch(model, 1)]
    run_dir = str(tmp_path / "run")
    arguments = {"config": make_config(model, 2, parallel={"tensor": 2}), "batches": batches, "run_dir": run_dir}
    saved = run_world(2, "learner.run_layouts:save_and_continue", arguments)
    for ranks, parallel in ((2, {"tensor": 2}), (2, {"pipeline": 2}), (2, {}), (1, {})):
        config = make_config(model, ranks, parallel=parallel)
        loaded = run_world(ranks, "learner.run_layouts:load_and_continue", {**arguments, "config": config})
        assert loaded["steps"] == saved["steps"] == 3
        for name in ("loss", "ess/ratio", "grad_norm/total", "lr/effective"):
            assert loaded["result"].metrics[name] == pytest.approx(saved["result"].metrics[name], rel=1e-4), name
        exact = parallel == {"tensor": 2}
        assert bool((loaded["random"] == saved["random"]).all()) is exact  # generators belong to ranks of a layout
        for name, parameter in loaded["parameters"].items():
            difference = (parameter - saved["parameters"][name]).abs().max()
            assert difference == 0 if exact else difference < 1e-3, name
