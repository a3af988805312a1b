"""Reading a SPEC.toml: what it holds, and every problem with the key that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.comparison.specs import EXAMPLE, written_spec
from tests.messages import assert_names
from vcpo_megatron.comparison.spec import load_spec
from vcpo_megatron.run.errors import ConfigError

EXAMPLES = sorted((EXAMPLE.parents[1] / "compare_methods").glob("*.toml"))


def test_a_spec(tmp_path: Path) -> None:
    spec = load_spec(written_spec(tmp_path))
    assert (spec.name, spec.folder, spec.base) == ("spec", tmp_path, EXAMPLE)
    assert (spec.steps, spec.eval_every, spec.lags, spec.rates, spec.seeds) == (40, 10, (16,), (1e-3,), (0, 1))
    assert spec.set == {"optimizer": {"schedule": "constant"}} and spec.target == 0.9
    assert [(method.name, method.lags) for method in spec.methods] == [("vcpo", None), ("synchronous", (0,))]
    assert spec.methods[1].set == {"algorithm": {"method": "grpo"}}


def test_a_whole_number_is_a_rate(tmp_path: Path) -> None:
    assert load_spec(written_spec(tmp_path, ("rates = [1e-3]", "rates = [1]"))).rates == (1.0,)


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_the_shipped_specs(path: Path) -> None:
    assert load_spec(path).base.samefile(EXAMPLE)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("steps = 40", "step = 40"), ("step: unknown key", "steps")),
        (("steps = 40", ""), ("steps: missing",)),
        (("steps = 40", 'steps = "40"'), ("steps = '40'", "integer")),
        (("lags = [16]", "lag = [16]"), ("lag: unknown key", "lags")),
        (("rates = [1e-3]", "lr = [1e-3]"), ("lr: unknown key", "rates")),
        (("lags = [16]", "lags = []"), ("lags: must not be empty",)),
        (("lags = [16]", "lags = [16, -1]"), ("lags[1] = -1", 0)),
        (("lags = [16]", "lags = [16, 4, 16]"), ("lags: 16", "2 times")),
        (("rates = [1e-3]", "rates = [inf]"), ("rates[0] = inf",)),
        (("eval_every = 10", "eval_every = 50"), ("eval_every = 50", "steps = 40")),
        (("lags = [0]", "lags = []"), ("'synchronous'", "lags")),
        (("lags = [0]", "lag = 0"), ("methods[1].lag: unknown key", "lags")),
        (("set.algorithm.method", "overrides.algorithm.method"), ("methods[1].overrides", "set")),
        (('name = "vcpo"', 'name = "synchronous"'), ("methods: name", "synchronous", "2 times")),
        (('name = "vcpo"', 'name = "vcpo_ess"'), ("'vcpo_ess'", "vcpo_ess_only", "set.algorithm.method")),
        (('name = "vcpo"', 'name = "../vcpo"'), ("'../vcpo'", "begins")),
        (('optimizer.schedule = "constant"', "optimizer.lr = 1e-3"), ("set.optimizer.lr", "rates")),
        (("set.algorithm.method", "set.staleness.lag"), ("set.staleness.lag", "lags")),
        (('run = "', 'name = "spec"\nrun = "'), ("name: unknown key",)),
    ],
)
def test_a_problem_names_its_key(tmp_path: Path, change: tuple[str, str], named: tuple[object, ...]) -> None:
    path = written_spec(tmp_path, change)
    with pytest.raises(ConfigError) as caught:
        load_spec(path)
    assert_names(caught.value, path, *named)


def test_all_problems_are_said_together(tmp_path: Path) -> None:
    path = written_spec(tmp_path, ("eval_every = 10", "eval_every = 50"), ("seeds = [0, 1]", "seeds = [1, 1]"))
    with pytest.raises(ConfigError) as caught:
        load_spec(path)
    assert len(caught.value.problems) == 2
