"""When a run turned, by literal curves, and which of its numbers first."""

from __future__ import annotations

import pytest

from tests.comparison.records import record
from vcpo_megatron.comparison.turning import first_to_turn, rows_of, smoothed, turning_point

RISE = (0.3, 0.6, 0.9, 0.9)


def test_smoothing_takes_the_neighbours_that_there_are() -> None:
    assert smoothed([0.0, 3.0, 6.0, 0.0]) == [1.5, 3.0, 3.0, 3.0]
    assert smoothed([0.5]) == [0.5] and smoothed([]) == []


@pytest.mark.parametrize(
    ("accuracy", "turned"),
    [
        ((), None),
        (RISE, None),
        ((*RISE, 0.9, 0.7, 0.2, 0.1), 5),  # smoothed: .833 in 4, .6 in 5
        ((*RISE, 0.2, 0.1, 0.9, 0.9, 0.9), None),  # it came back
        ((*RISE, 0.9, 0.85, 0.82, 0.81, 0.81), None),  # less than .1
        ((0.3, 0.2, 0.1, 0.1, 0.1), 2),  # one that never learned
        ((0.1, 0.1, 0.9, 0.9), None),  # what comes before the best is no fall
    ],
)
def test_a_run_turns_where_it_falls_for_good(accuracy: tuple[float, ...], turned: int | None) -> None:
    assert turning_point(accuracy) == turned


def test_which_number_turned_first() -> None:
    """Accuracy every 20 steps, last good at 100: the mean weight falls at 85, KL rises at 110, ESS stays."""
    step = tuple(range(160))
    wave = [0.01 * (index % 5) for index in step]
    series = {
        "kl/behavior": tuple(0.1 + wave[i] if i < 110 else 0.5 for i in step),
        "weight/mean": tuple(1.0 + wave[i] if i < 85 else 0.4 for i in step),
        "ess/ratio": tuple(0.8 + wave[i] for i in step),
    }
    fell = record(
        evaluated=tuple(range(0, 180, 20)),
        accuracy=(*RISE, 0.9, 0.9, 0.3, 0.2, 0.1),
        samples=(512,) * 9,
        step=step,
        process_seconds=(None,) * 160,
        series=series,
    )
    assert first_to_turn(fell) == "weight/mean"
    stays = record(
        evaluated=fell.evaluated, accuracy=(*RISE, *(0.9,) * 5), step=step, process_seconds=(), series=series
    )
    assert first_to_turn(stays) is None


def test_rows_are_those_of_the_metrics() -> None:
    rows = [
        {"step": 0, "ess/ratio": 1.0, "eval/accuracy": 0.3},
        {"step": 1, "ess/ratio": 0.8},
        {"step": 2, "eval/accuracy": 0.6},
        {"step": 3, "ess/ratio": 0.6, "eval/accuracy": 0.9},
    ]
    assert rows_of(record()) == rows
    of_512 = [{**row, "eval/samples": 512} if "eval/accuracy" in row else row for row in rows]
    assert rows_of(record(samples=(512,) * 3)) == of_512
