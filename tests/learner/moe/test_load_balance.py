"""The experts' load-balancing loss over the whole batch: its gradient is added once, whatever the packs and the layout,
and no norm, baseline or learning rate knows of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.slow import matrix
from vcpo_megatron.types import Batch

from ..scenarios import _by_expert, make_batch, make_config, make_model_folder, oracle_step, reference
from ..world import run_world

COEFFICIENT = 0.75
SP: dict[str, Any] = {"tensor": 2, "sequence_parallel": True}
#: name -> (ranks, layout, [algorithm], [model], max_pack_tokens).
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    "single": (1, {}, {}, {}, 40),
    "single whole groups": (1, {}, {}, {}, 1000),
    "single two-pass full recompute": (1, {}, {"opob_mode": "two_pass"}, {"recompute": "full"}, 1),
    "single ess only": (1, {}, {"method": "vcpo_ess_only"}, {}, 40),
    "dp2": (2, {}, {}, {}, 40),
    "ep2": (2, {"expert": 2}, {}, {}, 40),
    "tp2 sp etp2 deferred": (2, {**SP, "expert_tensor": 2}, {"opob_mode": "deferred"}, {}, 40),
    "cp2 ep2 full recompute": (2, {"context": 2, "expert": 2}, {}, {"recompute": "full"}, 40),
    "pp2": (2, {"pipeline": 2}, {}, {}, 40),
    "pp2 vpp2 deferred": (
        2,
        {"pipeline": 2, "virtual_pipeline": 2},
        {"opob_mode": "deferred"},
        {"recompute": "selective"},
        40,
    ),
    "ep2 dp4": (4, {"expert": 2}, {}, {}, 40),
    "tp2 sp pp2 ep2": (4, {**SP, "expert": 2, "pipeline": 2}, {}, {}, 40),
}
#: One of each kind of parallelism; the other rows are slow.
DEFAULT = ("single", "dp2", "ep2", "tp2 sp etp2 deferred", "cp2 ep2 full recompute", "pp2")


def balance(folder: Path, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean over layers of E sum_e f_e P_e; gradient of coef times their sum, by transformers' own model in fp64."""
    model = reference(folder)
    scores: list[list[torch.Tensor]] = []
    for trajectory in (t for group in batch.groups for t in group.trajectories):
        ids = torch.tensor(trajectory.tokens[None, :-1].astype(np.int64))
        scores.append([torch.softmax(one, -1) for one in model(ids, output_router_logits=True).router_logits])
    loss = torch.zeros((), dtype=torch.float64)
    for layer in zip(*scores, strict=True):
        p = torch.cat(layer)
        sent = torch.zeros_like(p).scatter(1, p.topk(2, dim=1).indices, 1.0)
        loss = loss + COEFFICIENT * p.shape[1] * (sent.mean(0) / 2 * p.mean(0)).sum()
    names = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(names.values()), allow_unused=True)
    pairs = zip(names.items(), found, strict=True)
    gradient = _by_expert({name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs})
    return float(loss.detach()) / COEFFICIENT / len(scores[0]), gradient


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Batch, float, dict[str, torch.Tensor]]:
    """The model, its batch, and the loss of that with its gradient."""
    model = make_model_folder(tmp_path_factory.mktemp("balance") / "moe", "moe")
    batch = make_batch(model)
    return (model, batch, *balance(model, batch))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", matrix(CASES, DEFAULT))
def test_its_gradient_is_added_once_in_every_layout(name: str, known: Any) -> None:
    (model, batch, value, pull), (ranks, parallel, algorithm, held, pack) = known, CASES[name]
    config = make_config(
        model,
        ranks,
        parallel=parallel,
        algorithm={**algorithm, "global_aux_loss": COEFFICIENT},
        model=held,
        train={"max_pack_tokens": pack},
    )
    (outcome,) = run_world(ranks, "learner.run_layouts:one_step_each", {"cases": [(config, [batch])]})
    oracle, result = oracle_step(model, batch, config), outcome["results"][0]
    largest = max(float(g.abs().max()) for g in oracle.gradients.values())
    assert max(float(g.abs().max()) for g in pull.values()) > 0.05 * largest  # it would be seen
    for key, gradient in outcome["gradients"].items():
        apart = float((gradient.double() - oracle.gradients[key] - pull[key]).abs().max())
        assert apart <= 1e-5 * largest, key
    norms = torch.tensor([t.grad_norm for t in result.trajectories], dtype=torch.float64)
    assert bool(norms.isnan().all()) == ("method" in algorithm)
    kept = ~norms.isnan()
    torch.testing.assert_close(norms[kept], oracle.norms[kept], rtol=5e-6, atol=0)
    assert result.metrics["experts/balance"] == pytest.approx(value, rel=1e-5)
    assert result.metrics["lr/effective"] == pytest.approx(oracle.learning_rate, rel=5e-6)
