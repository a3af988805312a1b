"""What a dry run says that the configuration comes to."""

from __future__ import annotations

from typing import Any

import pytest

from vcpo_megatron.config.methods import METHODS
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.planning.decisions import decisions


def lines(**sections: dict[str, Any]) -> dict[str, list[str]]:
    """Subject -> what is said of it."""
    model = {"path": "/m", "dtype": "bfloat16"}
    base = {"model": model, "train": {"steps": 30}, "environment": {"name": "modular_sum"}}
    config = RunConfig.model_validate({**base, **{name: {**base.get(name, {}), **v} for name, v in sections.items()}})
    found: dict[str, list[str]] = {}
    for line in decisions(config).splitlines():
        name = line[:13].strip()
        found.setdefault(name or list(found)[-1], []).append(line[13:])
    return found


def test_a_run_with_its_defaults() -> None:
    assert lines() == {
        "method": [
            "vcpo: OPOB baseline, ESS step size, truncated sequence weights",
            "baseline = opob",
            "importance = sequence, truncated at 8; surrogate = weighted",
            "advantages divided by the group's standard deviation; normalization = sequence_token_mean",
            "learning rate 1e-06, constant; scaled by ESS, sqrt, base 1",
        ],
        "precision": ["bfloat16 parameters and activations, float32 logits; float32 gradients and optimizer"],
        "batch": [
            "8 groups x 8 answers = 64 trajectories a step, 64 a data-parallel replica (replicas: 1, learner ranks: 1)"
        ],
        "run": [
            "30 steps: 240 groups, 1920 trajectories of at most 1024 sampled tokens",
            "evaluation every 20 steps, checkpoint every 50 steps",
        ],
        "staleness": ["at most 4 versions; at most 320 trajectories sampled ahead; servers: 1"],
        "not default": ["model.path = /m", "train.steps = 30", "environment.name = modular_sum"],
    }


def test_what_is_given_is_told_from_what_the_method_gives() -> None:
    found = lines(
        algorithm={"method": "dr_grpo", "baseline": "zero", "ratio_high": 1.3},
        parallel={"tensor": 2},
        launch={"learner_ranks": 6},
        train={"groups_per_step": 5, "eval_every": 0},
        staleness={"lag": "exact", "max_staleness": 0},
        optimizer={"betas": (0.9, 0.99)},
    )
    assert found["method"] == [
        "dr_grpo: GRPO without std and length terms",
        "baseline = zero (given)",
        "importance = none, ratios from 0.8 to 1.3; surrogate = ppo_clip",
        "advantages as they are; normalization = constant",
        "learning rate 1e-06, constant; not scaled by ESS",
    ]
    (line,) = found["batch"]
    assert line.startswith("5 groups x 8 answers = 40 trajectories a step, 13 or 14 a data-parallel replica")
    assert line.endswith("(replicas: 3, learner ranks: 6)")
    assert found["run"][1] == "no evaluation on the way, checkpoint every 50 steps"
    assert found["staleness"] == ["exactly 0 versions; at most 40 trajectories sampled ahead; servers: 1"]
    assert {
        "algorithm.method = dr_grpo  (default vcpo)",
        "algorithm.baseline = zero  (default none)",
        "parallel.tensor = 2  (default 1)",
        "optimizer.betas = 0.9, 0.99  (default 0.9, 0.999)",
        "staleness.lag = exact  (default bounded)",
    } <= set(found["not default"])


def test_bounds_of_the_step_are_said_where_they_are_on() -> None:
    said = lines(algorithm={"method": "vcpo_plus", "spike_clip": 4.0})["method"]
    assert said[-1] == "step bounded: relative_kl at 0.3, norms clipped at 4 times the recent ones (given)"
    assert lines(algorithm={"step_bound": "relative_kl"})["method"][-1] == "step bounded: relative_kl at 0.3 (given)"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_can_be_said(method: str) -> None:
    assert lines(algorithm={"method": method})["method"][0].startswith(f"{method}: ")
