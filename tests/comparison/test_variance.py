"""Second moments of the estimator under several baselines: by hand, by a search, and from a store."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.comparison.specs import EXAMPLE
from tests.orchestrator.store.test_store import sample_group
from vcpo_megatron.comparison.variance import (
    WeightedGroup,
    averaged,
    groups_by_step,
    parts,
    run_variance,
    study,
    without_each,
)
from vcpo_megatron.config.load import dump_resolved, load_config
from vcpo_megatron.orchestrator.store.store import RolloutStore
from vcpo_megatron.run.errors import ConfigError
from vcpo_megatron.types import TrajectoryResult


def group(rewards: list[float], weights: list[float], norms: list[float], baseline: float = 0.0) -> WeightedGroup:
    log_w = np.log(np.array(weights))
    return WeightedGroup(
        np.array(rewards), log_w, log_w, np.array(norms), np.full(len(rewards), baseline, dtype=np.float64)
    )


def test_second_moments_by_hand() -> None:
    """w^2 |g|^2 = 1, 4, 4: OPOB is 5/9 of rewards 1, 1, 0."""
    found = group([1.0, 1.0, 0.0], [1.0, 2.0, 0.5], [1.0, 1.0, 4.0], 0.25).second_moments(normalize=False)
    assert found == pytest.approx(
        {
            "none": 5.0,
            "group mean": 5 * (1 / 3) ** 2 + 4 * (2 / 3) ** 2,
            "leave-one-out": 1 * 0.5**2 + 4 * 0.5**2 + 4 * 1.0**2,
            "OPOB": 5 * (4 / 9) ** 2 + 4 * (5 / 9) ** 2,
            # without the first: 4/8; without the second: 1/5; without the third: 1
            "OPOB leave-one-out": 1 * 0.5**2 + 4 * 0.8**2 + 4 * 1.0**2,
            "as trained": 5 * 0.75**2 + 4 * 0.25**2,
            "least": 5 * (4 / 9) ** 2 + 4 * (5 / 9) ** 2,
        }
    )


def test_the_group_s_deviation_divides_it() -> None:
    of = group([1.0, 1.0, 0.0, 0.0], [1.0] * 4, [1.0] * 4)
    assert of.second_moments(normalize=False)["group mean"] == pytest.approx(1.0)
    assert of.second_moments(normalize=True)["group mean"] == pytest.approx(4.0)


def test_least_is_the_least_of_all_constants() -> None:
    """Against a search over 20,001 constants, with weights that are not those of OPOB."""
    rng = np.random.default_rng(0)
    rewards, log_w, log_u = rng.random(8), rng.normal(size=8), rng.normal(size=8)
    of = WeightedGroup(rewards, log_w, log_u, np.exp(rng.normal(size=8)), np.zeros(8))
    found = of.second_moments(normalize=False)
    tried = np.linspace(0, 1, 20_001)
    terms = np.exp(2 * log_w) * of.norms**2
    least = min(float((terms * (rewards - b) ** 2).sum()) for b in tried)
    assert found["least"] == pytest.approx(least, rel=1e-6)
    assert found["OPOB"] > found["least"] * 1.001
    assert all(value >= found["least"] for name, value in found.items() if name != "OPOB leave-one-out")


def test_averages_in_log_space() -> None:
    rewards = np.array([1.0, 0.0])
    assert averaged(rewards, np.array([-2000.0, -2000.0 + math.log(3)])) == pytest.approx(0.25)
    assert averaged(rewards, np.array([-math.inf, -math.inf])) == 0.5
    assert averaged(rewards, np.array([0.0, -math.inf])) == 1.0
    assert without_each(np.array([1.0, 2.0, 6.0]), np.zeros(3)).tolist() == [4.0, 3.5, 1.5]


def rows(step: int, group_id: int, *members: tuple[float, float | None]) -> list[dict[str, Any]]:
    """Rows of a store's history: reward and norm, weight 2 cut from 4."""
    return [
        {
            **{"state": "trained", "step": step, "group_id": group_id, "reward": reward, "grad_norm": norm},
            **{"weight": 2.0, "log_ratio": math.log(4.0), "baseline": 0.5},
        }
        for reward, norm in members
    ]


def test_groups_are_read_from_the_history() -> None:
    config = load_config(EXAMPLE)
    history = [
        *rows(0, 0, (1.0, 1.0), (0.0, 2.0)),
        *rows(0, 1, (1.0, 1.0), (1.0, 1.0)),  # no variance
        *rows(1, 2, (1.0, None), (0.0, 1.0)),  # a norm is not known
        *[{**row, "state": "dropped"} for row in rows(2, 3, (1.0, 1.0), (0.0, 1.0))],
    ]
    found = groups_by_step(iter(history), config)
    assert {step: len(groups) for step, groups in found.items()} == {0: 1}
    (only,) = found[0]
    assert np.exp(only.log_w).tolist() == pytest.approx([2.0, 2.0])
    assert np.exp(only.log_u).tolist() == pytest.approx([4.0, 4.0])  # OPOB takes the raw one
    tokens = load_config(EXAMPLE, ["algorithm.is_level=token"])
    (only,) = groups_by_step(iter(history), tokens)[0]
    assert only.log_w.tolist() == only.log_u.tolist() == [0.0, 0.0]


def test_ratios_are_medians_over_steps() -> None:
    """Rewards 1 and 0 with norms n and 1: n^2 without one, (n^2 + 1) / 4 for the mean, n^2 / (n^2 + 1) for OPOB."""
    config = load_config(EXAMPLE)
    steps = {step: [group([1.0, 0.0], [1.0, 1.0], [n, 1.0])] for step, n in enumerate((1.0, 2.0, 3.0))}
    found = run_variance("a", config, steps)
    assert found is not None and (found.steps, found.lag, found.method) == (3, 16, "vcpo")
    assert (found.first, found.last) == (0, 2)
    assert found.ratios["none"] == pytest.approx((5.0, 9.0))  # of 2, 5 and 10
    assert found.ratios["group mean"][0] == pytest.approx(25 / 16)
    assert found.ratios["OPOB"] == (1.0, 1.0)
    assert run_variance("a", config, {}) is None
    alone = {0: [group([1.0, 0.0], [1.0, 1.0], [1.0, 0.0])]}  # b is the reward of the one that has a norm
    assert run_variance("a", config, alone) is None


def test_a_run_in_four_parts() -> None:
    steps = {step: [group([1.0, 0.0], [1.0, 1.0], [1.0, 1.0])] for step in (0, 1, 2, 5, 9)}
    assert [list(part) for part in parts(steps, 10)] == [[0, 1], [2], [5], [9]]
    assert [list(part) for part in parts(steps, 40)] == [[0, 1, 2, 5, 9]]


def test_a_store_is_read(tmp_path: Path) -> None:
    """A group a step: rewards 0 and 0.25 with norms 1 and 2."""
    toml = dump_resolved(load_config(EXAMPLE, ["train.steps=4"]))
    (tmp_path / "resolved.toml").write_text(toml)
    with RolloutStore(tmp_path / "rollouts.sqlite") as store:
        for group_id in (0, 1):
            sample_group(store, group_id)
            results = [TrajectoryResult(group_id, sample, 0.0, 1.0, 1.0 + sample, 0.45) for sample in (0, 1)]
            store.mark_trained(group_id, results, [group_id], [0])
    head, _, first, second, *_ = study([tmp_path]).splitlines()
    assert head.split(" | ")[5:8] == ["none", "group mean", "leave-one-out"]
    cells = first.split(" | ")
    assert cells[1:5] == ["vcpo", "16", "0-0", "1"] and second.split(" | ")[3] == "1-1"
    # least: b = .2, (.2)^2 + 4 (.05)^2 = .05; none: 1/4; mean: 5/64; the others': 5/16; b = .45: .3625
    assert [cell.split()[0] for cell in cells[5:11]] == ["5", "1.56", "6.25", "1", "6.25", "7.25"]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="resolved.toml"):
        study([tmp_path])
