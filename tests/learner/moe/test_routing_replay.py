"""Routing replay: the learner follows recorded experts, in every layout, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.slow import matrix
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.learner.batch.packing import Share, batch_samples, make_pack
from vcpo_megatron.types import Batch, Group, Trajectory

from ..scenarios import Oracle, make_batch, make_config, make_model_folder, oracle_step, reference
from ..world import run_world

ONE_STEP = "learner.run_layouts:one_step_each"
REPLAY = {"rollout": {"max_new_tokens": 16, "temperature": 0.9, "routing_replay": True}}
LAYERS, EXPERTS, TOP_K, UNKNOWN = 4, 4, 2, 255
SP = {"tensor": 2, "sequence_parallel": True}
FULL = {"model": {"recompute": "full"}}
#: ranks, [parallel], further sections
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "single": (1, {}, {}),
    "single, layers computed twice": (1, {}, FULL),
    "single, two passes, layers computed twice": (1, {}, {**FULL, "algorithm": {"opob_mode": "two_pass"}}),
    "tp2 sp": (2, {**SP, "expert_tensor": 2}, {}),
    "ep2": (2, {"expert": 2}, FULL),
    "pp2": (2, {"pipeline": 2}, FULL),
    "pp2 vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}, {}),
    "cp2": (2, {"context": 2}, {}),
}


def with_experts(batch: Batch, experts: Any) -> Batch:
    """``experts(trajectory)``: uint8 [L, layers, k]."""
    groups = [
        Group(g.group_id, g.prompt_id, tuple(replace(t, routed_experts=experts(t)) for t in g.trajectories))
        for g in batch.groups
    ]
    return Batch(batch.step, tuple(groups))


def strange(t: Trajectory) -> np.ndarray:
    """Experts at random, a fifth of the tokens without a record."""
    generator = np.random.default_rng(t.group_id * 10 + t.sample_index)
    chosen = generator.random((len(t.tokens), LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.uint8)
    chosen[generator.random(len(t.tokens)) < 0.2] = UNKNOWN
    chosen[-1] = UNKNOWN
    return chosen


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("routing") / "moe", "moe", layers=LAYERS)


def own(model: Path) -> Any:
    """The model's own choice, by transformers; best expert last, so that the order within k differs."""
    policy = reference(model)
    found: list[torch.Tensor] = []
    for layer in policy.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, output: found.append(output[2]))

    def experts(t: Trajectory) -> np.ndarray:
        found.clear()
        with torch.no_grad():
            policy(torch.tensor(t.tokens[None].astype(np.int64)))
        return torch.stack(found, dim=1).flip(-1).to(torch.uint8).numpy()

    return experts


def config(model: Path, name: str) -> RunConfig:
    ranks, parallel, sections = LAYOUTS[name]
    return make_config(model, ranks, parallel=parallel, **REPLAY, **sections)


#: One of each kind of parallelism; the other rows are slow.
DEFAULT = ("single", "single, layers computed twice", "tp2 sp", "ep2", "pp2", "cp2")


@pytest.fixture(scope="module")
def strange_batch(model: Path) -> Batch:
    return with_experts(make_batch(model), strange)


@pytest.fixture(scope="module")
def oracle(model: Path, strange_batch: Batch) -> Oracle:
    return oracle_step(model, strange_batch, config(model, "single"))


def step(chosen: RunConfig, batch: Batch, ranks: int = 1) -> dict[str, Any]:
    (outcome,) = run_world(ranks, ONE_STEP, {"cases": [(chosen, [batch])]})
    return outcome


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", matrix(LAYOUTS, DEFAULT))
def test_the_step_is_that_of_an_oracle_with_forced_experts(
    name: str, model: Path, strange_batch: Batch, oracle: Oracle
) -> None:
    """On strange experts in every layout."""
    outcome = step(config(model, name), strange_batch, LAYOUTS[name][0])
    result = outcome["results"][0]
    rows = result.trajectories
    ratios = torch.tensor([row.log_ratio for row in rows], dtype=torch.float64)
    torch.testing.assert_close(ratios, oracle.log_ratios, rtol=0, atol=2e-5)
    norms = torch.tensor([row.grad_norm for row in rows], dtype=torch.float64)
    torch.testing.assert_close(norms[~norms.isnan()], oracle.norms[~norms.isnan()], rtol=5e-6, atol=0)
    assert int((~norms.isnan()).sum()) == 12
    assert result.metrics["loss"] == pytest.approx(oracle.loss, rel=2e-5)
    largest = max(float(g.abs().max()) for g in oracle.gradients.values())
    for key, gradient in oracle.gradients.items():
        difference = float((outcome["gradients"][key].double() - gradient).abs().max())
        assert difference < 1e-5 * largest, key


@pytest.mark.timeout(300)
def test_replaying_the_own_choice_changes_not_a_bit(model: Path, strange_batch: Batch) -> None:
    plain, replayed = make_batch(model), config(model, "single")
    off = step(make_config(model, 1), strange_batch)
    own_choice, unknown = step(replayed, with_experts(plain, own(model))), step(replayed, plain)
    for other in (own_choice, unknown):
        assert repr(other["results"][0].trajectories) == repr(off["results"][0].trajectories)
        for kind in ("gradients", "parameters"):
            for key, tensor in off[kind].items():
                assert torch.equal(other[kind][key], tensor), key
    pair = [outcome["results"][0].trajectories for outcome in (step(replayed, strange_batch), off)]
    apart = [abs(a.log_ratio - b.log_ratio) for a, b in zip(*pair, strict=True)]
    assert max(apart) > 0.1  # the record mattered


def test_a_pack_lays_records_beside_its_tokens(model: Path) -> None:
    batch = make_batch(model)
    rows = batch_samples(batch)[0][:2]
    recorded = replace(rows[0].trajectory, routed_experts=strange(rows[0].trajectory))
    both = [replace(rows[0], trajectory=recorded), rows[1]]
    pack = make_pack(both, Share(multiple=2), torch.device("cpu"))
    first = rows[0].cost
    assert pack.experts is not None and pack.experts.shape == (len(pack.tokens), LAYERS, TOP_K)
    expected = recorded.routed_experts[:-1].astype(int)
    assert np.array_equal(pack.experts[:first].numpy(), np.where(expected == UNKNOWN, -1, expected))
    assert bool((pack.experts[first:] == -1).all())  # no record, and padding
    assert make_pack(rows, Share(), torch.device("cpu")).experts is None
