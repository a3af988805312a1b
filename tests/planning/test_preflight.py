"""What keeps a configuration from running on any machine, its environment's problems included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.messages import assert_names
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.planning.preflight import config_problems


def config(model: Path, **environment: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": model},
            "train": {"steps": 1, "groups_per_step": 2, "group_size": 4},
            "rollout": {"max_new_tokens": 8},
            "environment": {"name": "modular_sum", **environment},
        }
    )


def test_a_configuration_that_can_run_has_none(model_folder: Path) -> None:
    assert config_problems(config(model_folder)) == []


def test_the_environment_is_asked_with_the_model_s_context(model_folder: Path) -> None:
    found = config_problems(config(model_folder, options={"digits": 60}))
    assert_names("\n".join(found), "prompt of 61 tokens", "answer of 60", "the model's context")


def test_a_file_is_named_once(model_folder: Path) -> None:
    (line,) = config_problems(config(model_folder, data="/nowhere.jsonl"))
    assert line.startswith("environment.data = ")


def test_without_a_model_the_environment_is_not_asked(tmp_path: Path) -> None:
    found = config_problems(config(tmp_path / "none", options={"digits": 0}))
    assert found and not any("digits" in line for line in found)
