"""Names that users of other trainers bring get the name that it has here."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import pytest

from tests.messages import assert_names
from vcpo_megatron.config import synonyms
from vcpo_megatron.config.load import load_config
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.run.errors import ConfigError

SECTIONS: dict[str, Any] = {name: field.annotation for name, field in RunConfig.model_fields.items()}
KEYS = {f"{name}.{key}" for name, model in SECTIONS.items() for key in model.model_fields}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n[train]\nsteps = 3\n[environment]\nname = "e"\n')
    return path


def said(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("train.eval_interval", "train.eval_every"),
        ("staleness.k", "staleness.max_staleness"),
        ("rollout.n", "train.group_size"),
        ("optimizer.grad_clip", "optimizer.clip_grad"),
        ("parallel.tensor_model_parallel_size", "parallel.tensor"),
        ("rollout.tensor_model_parallel_size", "rollout.tensor_parallel"),
        ("parallel.tensor-model-parallel-size", "parallel.tensor"),
        ("parallel.TP", "parallel.tensor"),
        ("train.max_steps", "train.steps"),
        ("train.learning_rate", "optimizer.lr"),
        ("rollout.max_response_length", "rollout.max_new_tokens"),
        ("algorithm.beta", "algorithm.kl_coef"),
        ("checkpoint.save_freq", "checkpoint.every"),
        ("checkpoint.load", "train.start_from"),
        ("staleness.max_async_level", "staleness.max_staleness"),
        ("train.n_samples_per_prompt", "train.group_size"),
        ("environment.prompt_data", "environment.data"),
        ("train.use_wandb", "observability.wandb_project"),
        ("train.project_name", "observability.wandb_project"),
    ],
)
def test_a_key_of_another_trainer(file: Path, given: str, ours: str) -> None:
    assert said(file, f"{given}=1") == f"{given}: unknown key; did you mean {ours}?"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("parallel.dp", "data parallel is what tensor x pipeline x context leave of launch.learner_ranks"),
        ("train.batch_size", "a batch is train.groups_per_step prompts x train.group_size answers here"),
        ("algorithm.clip_ratio", "algorithm.ratio_low and ratio_high"),
        ("train.total_epochs", "a run is train.steps long"),
        ("rollout.gpu_memory_utilization", 'rollout.args = ["--mem-fraction-static=0.8"]'),
    ],
)
def test_what_there_is_instead(file: Path, given: str, words: str) -> None:
    problem = said(file, f"{given}=1")
    assert problem.startswith(f"{given}: unknown key; ") and words in problem


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("algorithm.method=ppo", '"ppo_clip"'),
        ("algorithm.method=DrGRPO", '"dr_grpo"'),
        ("algorithm.baseline=rloo", '"leave_one_out"'),
        ("algorithm.loss_normalization=seq-mean-token-sum-norm", '"constant"'),
        ("model.dtype=bf16", '"bfloat16"'),
        ("rollout.engine=vllm", '"sglang"'),
        ("rollout.sync=nccl", '"distributed"'),
        ("optimizer.schedule=linear", '"wsd"'),
        ("optimizer.schedule=cosin", '"cosine"'),  # nearest, as before
    ],
)
def test_a_value_of_another_trainer(file: Path, given: str, ours: str) -> None:
    assert said(file, given).endswith(f"; did you mean {ours}?")


def test_a_section_of_another_trainer_names_what_is_in_it(file: Path) -> None:
    problem = said(file, "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.optim.lr=1e-6")
    pairs = ("rollout.n is train.group_size", "actor.optim.lr is optimizer.lr")
    assert_names(problem, "actor_rollout_ref: unknown section", *(f"actor_rollout_ref.{pair} here" for pair in pairs))
    many = [f"trainer.{name}=1" for name in ("total_epochs", "save_freq", "test_freq", "n_gpus_per_node", "lr", "seed")]
    problem = said(file, *many)
    assert_names(problem, "trainer: unknown section", "trainer.total_epochs", "train.steps")
    assert problem.endswith("trainer.n_gpus_per_node is launch.learner_ranks here (and 2 more)")
    assert said(file, "trainer.zzz=1") == "trainer: unknown section; did you mean [train]?"


def test_whatever_is_suggested_exists() -> None:
    keys = {**synonyms._KEYS, **synonyms._IN_SECTION}
    assert len(keys) >= 50
    assert {ours for ours in keys.values() if " " not in ours} <= KEYS
    assert set(synonyms._SECTIONS.values()) <= SECTIONS.keys()
    for name in synonyms._IN_SECTION:  # elsewhere the same name stands for what it does in any section
        assert name not in KEYS
    for key, values in synonyms._VALUES.items():
        section, name = key.split(".")
        annotation = SECTIONS[section].model_fields[name].annotation
        allowed = {value for part in (annotation, *typing.get_args(annotation)) for value in typing.get_args(part)}
        assert set(values.values()) <= allowed | set(typing.get_args(annotation)), key
        assert not {value for value in values if value in allowed}, key


def test_no_synonym_hides_a_key_of_ours() -> None:
    ours = {key.partition(".")[2] for key in KEYS}
    assert synonyms._KEYS.keys() & ours == {"data"}  # of [environment]; said of [parallel]
