"""From a spec to runs: which there are, what each is configured as, what makes two of them the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.comparison.specs import EXAMPLE, written_spec
from tests.messages import assert_names
from vcpo_megatron.comparison.matrix import PlannedRun, digest_of, planned_runs, problems_of, summed_problems
from vcpo_megatron.comparison.spec import load_spec
from vcpo_megatron.config.load import load_config
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.run.errors import ConfigError


def runs(folder: Path, *changes: tuple[str, str]) -> list[PlannedRun]:
    return planned_runs(load_spec(written_spec(folder, *changes)))


def test_methods_times_lags_times_rates_times_seeds(tmp_path: Path) -> None:
    found = runs(tmp_path, ("lags = [16]", "lags = [4, 16]"), ("rates = [1e-3]", "rates = [1e-3, 2e-3]"))
    assert [(run.method, run.lag, run.rate, run.seed) for run in found] == [
        (method, lag, rate, seed)
        for seed in (0, 1)
        for method, lags in (("vcpo", (4, 16)), ("synchronous", (0,)))
        for lag in lags
        for rate in (1e-3, 2e-3)
    ]
    assert len({run.digest for run in found}) == len({run.name for run in found}) == len(found)


def test_what_a_run_is_configured_as(tmp_path: Path) -> None:
    run = runs(tmp_path)[1]
    config = run.config
    assert run.label == "synchronous, lag 0, rate 0.001, seed 0"
    assert (config.algorithm.method, config.optimizer.schedule, config.optimizer.lr) == ("grpo", "constant", 1e-3)
    assert (config.staleness.lag, config.staleness.max_staleness) == ("exact", 0)
    assert (config.train.steps, config.train.eval_every, config.train.seed) == (40, 10, 0)
    assert config.model.dtype == "float32" and config.model.path == EXAMPLE.parent / "model"
    assert config.environment.modules == EXAMPLE.parent


def test_a_method_s_own_keys_win(tmp_path: Path) -> None:
    own = 'name = "vcpo"\nset.optimizer.schedule = "cosine"\nset.algorithm.method = "tis_token"'
    config = runs(tmp_path, ('name = "vcpo"', own))[0].config
    assert (config.optimizer.schedule, config.algorithm.method) == ("cosine", "tis_token")


def test_relative_paths_are_the_spec_s(tmp_path: Path) -> None:
    heldout = ('optimizer.schedule = "constant"', 'environment.heldout = "mine.jsonl"')
    assert runs(tmp_path, heldout)[0].config.environment.heldout == tmp_path / "mine.jsonl"


def test_tables_within_sections_become_one(tmp_path: Path) -> None:
    options = ('optimizer.schedule = "constant"', "environment.options.digits = 4")
    assert runs(tmp_path, options)[0].config.environment.options == {"digits": 4, "modulus": 10}


def test_a_wrong_key_is_said_once_with_the_runs_that_have_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        runs(tmp_path, ('optimizer.schedule = "constant"', "optimizer.sedule = 1"))
    (problem,) = caught.value.problems
    assert_names(problem, "all 4 runs", "optimizer.sedule", "optimizer.schedule")
    with pytest.raises(ConfigError) as caught:
        runs(tmp_path, ('method = "grpo"', 'method = "gpro"'))
    assert_names(caught.value, "2 of 4 runs", "synchronous", "algorithm.method", "grpo")


def with_(*overrides: str) -> str:
    return digest_of(load_config(EXAMPLE, overrides))


def test_a_digest_is_of_what_decides_the_result() -> None:
    assert len(with_()) == 24 and with_() == with_()
    same = (
        "checkpoint.every=7",
        "observability.tensorboard=false",
        "launch.grace_s=9.0",
        "environment.date=2026-01-31",
    )
    assert {with_(override) for override in same} == {with_()}
    other = ("train.seed=1", "optimizer.lr=2e-3", "algorithm.method=grpo", "launch.learner_ranks=4", "train.steps=361")
    assert len({with_(override) for override in other} | {with_()}) == len(other) + 1


def test_each_environment_is_tried_once(tmp_path: Path) -> None:
    asked: list[tuple[str, bool]] = []

    def examine(config: RunConfig, whole: bool) -> list[str]:
        asked.append((config.algorithm.method, whole))
        return ["k is odd"] if config.staleness.max_staleness else ["k is odd", "so is t"]

    of_all, of_some = problems_of(runs(tmp_path), examine)
    assert of_all == "all 4 runs: k is odd"
    assert_names(of_some, "2 of 4 runs", "synchronous", "lag 0", "seed 0", "so is t")
    assert asked == [("vcpo", True), ("grpo", False), ("vcpo", False), ("grpo", False)]


def test_one_run_with_a_problem_is_named() -> None:
    assert summed_problems({"a": ["x"], "b": []}, of=2) == ["a: x"]
    assert summed_problems({"a": ["x"]}, of=1) == ["a: x"]
