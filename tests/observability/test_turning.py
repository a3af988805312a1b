"""When a run turned, and which of its numbers first: literal curves."""

from __future__ import annotations

import pytest

from vcpo_megatron.observability.turning import best_evaluation, first_to_turn, smoothed, turning_point

RISE = (0.3, 0.6, 0.9, 0.9)


def test_smoothing_takes_the_neighbours_that_there_are() -> None:
    assert smoothed([0.0, 3.0, 6.0, 0.0]) == [1.5, 3.0, 3.0, 3.0]
    assert smoothed([0.5]) == [0.5] and smoothed([]) == []


def test_the_best_evaluation_is_the_first_of_equal_ones() -> None:
    assert best_evaluation([0.2, 0.8, 0.8, 0.8, 0.2]) == 2
    assert best_evaluation([0.0, 1.0, 0.0, 0.6, 0.6, 0.6]) == 4  # one lucky evaluation is not the best
    with pytest.raises(ValueError):
        best_evaluation([])


@pytest.mark.parametrize(
    ("accuracy", "turned"),
    [
        ((), None),
        (RISE, None),
        ((*RISE, 0.9, 0.7, 0.2, 0.1), 5),  # smoothed: .833 in 4, .6 in 5
        ((*RISE, 0.2, 0.1, 0.9, 0.9, 0.9), None),  # it came back
        ((*RISE, 0.9, 0.85, 0.82, 0.81, 0.81), None),  # less than .1
        ((0.3, 0.2, 0.1, 0.1, 0.1), 2),  # one that never learned
    ],
)
def test_a_run_turns_where_it_falls_for_good(accuracy: tuple[float, ...], turned: int | None) -> None:
    assert turning_point(accuracy) == turned


def test_which_number_turned_first() -> None:
    """Accuracy every 20 steps: best at 60, turned at 100. KL doubles at 75, ESS halves at 90, norms do nothing."""
    evaluated, accuracy = tuple(range(0, 180, 20)), (*RISE, 0.9, 0.7, 0.2, 0.1, 0.1)
    step = tuple(range(160))
    series = {
        "kl/behavior": [0.1 if index < 75 else 0.5 for index in step],
        "ess/ratio": [0.8 if index < 90 else 0.1 for index in step],
        "weight/mean": [None] * 160,
        "grad_norm/total": [1.0] * 160,
    }
    # the mean of 10 steps: .1 (10 - n) + .5 n > 2 for n = 3, .8 (10 - n) + .1 n < 4 for n = 6
    assert first_to_turn(evaluated, accuracy, step, series) == {"kl/behavior": 77, "ess/ratio": 95}
    assert list(first_to_turn(evaluated, accuracy, step, series)) == ["kl/behavior", "ess/ratio"]
    assert first_to_turn(evaluated, (*RISE, 0.9, 0.9, 0.9, 0.9, 0.9), step, series) == {}


def test_a_number_that_turns_the_good_way_did_not_turn() -> None:
    evaluated, accuracy, step = tuple(range(0, 180, 20)), (*RISE, 0.9, 0.7, 0.2, 0.1, 0.1), tuple(range(160))
    series = {
        "kl/behavior": [0.5 if index < 75 else 0.1 for index in step],
        "ess/ratio": [0.1 if index < 90 else 0.8 for index in step],
    }
    assert first_to_turn(evaluated, accuracy, step, series) == {}
