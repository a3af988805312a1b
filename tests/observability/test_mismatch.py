"""When the warning speaks, what it says, and when it is silent."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.messages import assert_names
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.observability.mismatch import MismatchWatch

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "head_dim": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}


def watch(folder: Path, family: str = "Qwen2", **sections: dict[str, Any]) -> MismatchWatch:
    more = EXPERTS if family == "Qwen3Moe" else {}
    kind = {"Qwen2": "qwen2", "Qwen3Moe": "qwen3_moe"}[family]
    config = {"architectures": [f"{family}ForCausalLM"], "model_type": kind, **SIZES, **more}
    (folder / "config.json").write_text(json.dumps(config))
    base: dict[str, dict[str, Any]] = {"train": {"steps": 1}, "environment": {"name": "none"}, **sections}
    base["model"] = {"path": folder, **sections.get("model", {})}
    return MismatchWatch(RunConfig.model_validate(base))


def metrics(mean: float) -> dict[str, float]:
    return {"mismatch/mean": mean, "mismatch/max": 3 * mean, "mismatch/tokens": 12.0}


def test_it_speaks_above_the_threshold_and_again_when_the_mismatch_doubles(tmp_path: Path) -> None:
    means = [0.01, 0.02, 0.021, 0.04, 0.05, 0.05, 0.101, 0.02, 0.03]
    found = watch(tmp_path)
    spoke = [found.observe(step, metrics(mean)) is not None for step, mean in enumerate(means)]
    assert spoke == [False, False, True, False, True, False, True, False, True]


def test_it_names_numbers_and_causes_of_this_run(tmp_path: Path) -> None:
    line = watch(tmp_path).observe(7, metrics(0.25)) or ""
    assert_names(line, "step 7", "0.25 nats on average", "at most 0.75", "12 tokens")
    assert "a sampling option" in line and "weights of the version" in line
    assert "bfloat16" not in line and "router" not in line and "in_place" not in line
    more = watch(tmp_path, "Qwen3Moe", model={"dtype": "bfloat16"}, rollout={"pause_mode": "in_place"})
    line = more.observe(7, metrics(0.25)) or ""
    assert "bfloat16" in line and "router" in line and "in_place" in line


@pytest.mark.parametrize("found", [{}, {"mismatch/tokens": 0.0}, metrics(math.nan)])
def test_nothing_measured_is_nothing_said(tmp_path: Path, found: dict[str, float]) -> None:
    assert watch(tmp_path).observe(0, found) is None


def test_inf_turns_it_off(tmp_path: Path) -> None:
    assert watch(tmp_path, observability={"mismatch_warning": math.inf}).observe(0, metrics(1e9)) is None
