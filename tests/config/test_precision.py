"""``model.dtype = "auto"`` is what the model's folder states, on any machine."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.messages import assert_names
from vcpo_megatron.config.checks.problems import problems
from vcpo_megatron.config.precision import with_dtype
from vcpo_megatron.config.schema import RolloutConfig, RunConfig
from vcpo_megatron.launch.start import settled, was_settled


def run(model: Path, **keys: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": model, **keys},
            "train": {"steps": 10},
            "rollout": {"max_new_tokens": 8},
            "environment": {"name": "modular_sum"},
        }
    )


@pytest.mark.parametrize(
    ("stated", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "float32"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "bfloat16"),
        ({}, "float32"),  # the stored tensors'
    ],
)
def test_auto_is_what_the_folder_states(make_model: Callable[..., Path], stated: dict[str, Any], dtype: str) -> None:
    folder = make_model(**stated)
    assert with_dtype(run(folder)).model.dtype == dtype
    kept = settled(run(folder), datetime.date(2026, 1, 1))
    assert kept.model.dtype == dtype and kept.model.path == folder
    assert problems(run(folder)) == []


def test_a_given_dtype_stays(make_model: Callable[..., Path]) -> None:
    folder = make_model(dtype="float16")
    assert [with_dtype(run(folder, dtype=dtype)).model.dtype for dtype in ("float32", "bfloat16")] == [
        "float32",
        "bfloat16",
    ]


def test_a_dtype_that_is_not_trained_in_is_refused_by_name(make_model: Callable[..., Path]) -> None:
    folder = make_model(dtype="float16")
    (line,) = problems(with_dtype(run(folder)))
    assert_names(line, 'model.dtype = "auto"', folder, "float16", '"float32" or "bfloat16"')


def test_a_folder_that_is_not_there_is_said_once(tmp_path: Path) -> None:
    (line,) = [line for line in problems(with_dtype(run(tmp_path / "none"))) if "model." in line]
    assert_names(line, f"model.path = {tmp_path / 'none'}", "no such folder")


def test_the_servers_flag_has_a_key_of_its_own(model_folder: Path) -> None:
    config = run(model_folder).model_copy(
        update={"rollout": RolloutConfig(engine="sglang", max_new_tokens=8, args=("--enable-fp32-lm-head",))}
    )
    (line,) = [line for line in problems(config) if "fp32" in line]
    assert_names(line, "rollout.args", "--enable-fp32-lm-head", "model.fp32_lm_head")


def test_a_resume_takes_the_settled_dtype_for_the_files_own() -> None:
    assert was_settled("model.dtype", "auto", "bfloat16")
    assert not was_settled("model.dtype", "float32", "bfloat16")
