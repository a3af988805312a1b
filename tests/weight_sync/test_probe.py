"""A server follows the learner, or is found out; by arrays whose truth is known, without any server."""

from __future__ import annotations

import numpy as np
import pytest

from vcpo_megatron.weight_sync.probe import Movement, probe_tokens

LENGTH = 15
START = -np.linspace(0.5, 20.0, LENGTH)
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
#: How much a step changes the learner's log-probs, and how well engine and learner agree.
STEP = {"float32": 1e-2, "bfloat16": 2e-2}
NOISE = {"float32": 1e-5, "bfloat16": 4e-2}


def learner(steps: int, dtype: str) -> list[np.ndarray]:
    """Its log-probs of every version: a walk of random steps."""
    moves = np.random.default_rng(1).normal(size=(steps, LENGTH)) * STEP[dtype]
    return [START, *(START + np.cumsum(moves, axis=0))]


@DTYPES
def test_a_server_that_follows_with_its_own_rounding_is_believed(dtype: str) -> None:
    rng, movement = np.random.default_rng(2), Movement(dtype)
    for version in learner(200, dtype):
        assert movement.problem(version + rng.uniform(-1, 1, LENGTH) * NOISE[dtype], version) is None


@DTYPES
def test_a_server_that_keeps_its_weights_is_found_at_the_first_update(dtype: str) -> None:
    versions, movement = learner(3, dtype), Movement(dtype)
    for version in versions[:2]:
        assert movement.problem(version + 1e-6, version) is None
    for _ in range(2):  # however often it gets them
        problem = movement.problem(versions[1] + 1e-6, versions[2])
        assert problem is not None and "still computes what it did before" in problem
    assert movement.problem(versions[2] + 1e-6, versions[2]) is None


@DTYPES
@pytest.mark.parametrize("change", [0.0, 5e-5])
def test_weights_that_hardly_changed_may_leave_a_server_as_it_was(dtype: str, change: float) -> None:
    """A step that was skipped, a batch without variance, the first steps of a warm-up."""
    movement = Movement(dtype)
    assert [movement.problem(START, START + change * (step % 2)) for step in range(5)] == [None] * 5


@DTYPES
def test_small_steps_add_up(dtype: str) -> None:
    movement = Movement(dtype)
    problems = [movement.problem(START, START + 5e-5 * step) for step in range(41)]
    assert problems[0] is None and problems[-1] is not None


@DTYPES
def test_a_server_whose_arithmetic_is_not_repeatable_is_found_when_the_learner_has_moved_on(dtype: str) -> None:
    rng, movement = np.random.default_rng(3), Movement(dtype)
    problems = [
        movement.problem(START + rng.uniform(-1, 1, LENGTH) * NOISE[dtype] / 4, version)
        for version in learner(2000, dtype)
    ]
    first = next(at for at, problem in enumerate(problems) if problem)
    assert "does not follow" in str(problems[first]) and first > 1
    assert all(problems[first + 500 :])


@DTYPES
def test_other_weights_than_the_learners_are_found_at_once_and_again(dtype: str) -> None:
    """A server was restarted, and has kept the weights of its model's folder."""
    version, movement = learner(1, dtype)[1], Movement(dtype)
    assert movement.problem(START, START) is None
    for _ in range(2):
        problem = movement.problem(START[::-1], version)
        assert problem is not None and "does not follow" in problem


def test_another_number_of_tokens_is_named() -> None:
    problem = Movement("float32").problem(START[:3], START)
    assert problem is not None and "3 tokens of the probe, the learner 15" in problem


@pytest.mark.parametrize("vocabulary", [2, 97, 151936])
def test_the_probe_lies_in_the_vocabulary(vocabulary: int) -> None:
    tokens = probe_tokens(vocabulary)
    assert len(tokens) == LENGTH + 1 and 0 <= tokens.min() <= tokens.max() < vocabulary
