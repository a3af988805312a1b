"""Numbers of a run and of several seeds, and the tables that hold them, by literals."""

from __future__ import annotations

import dataclasses

import pytest

from tests.comparison.records import record
from tests.messages import assert_names
from vcpo_megatron.comparison.summary import Band, band, means, summary_of
from vcpo_megatron.comparison.tables import report


def test_a_run_in_a_few_numbers() -> None:
    found = summary_of(record(), target=0.6)
    assert dataclasses.asdict(found) == {
        **{"final": pytest.approx(0.6), "best": 0.9, "turned": None, "first": None},
        **{"steps_to": 2, "process_seconds_to": 12.0, "process_seconds_a_step": 4.0, "seconds_a_step": None},
        **{"ess": pytest.approx(0.8), "ess_low": None, "weight_low": None, "kl_high": None, "norm_high": None},
    }


def test_extremes_are_of_means_over_ten_steps() -> None:
    steps = tuple(range(12))
    run = record(
        step=steps,
        process_seconds=(1.0,) * 12,
        series={"ess/ratio": (0.0, *(1.0,) * 11), "kl/behavior": (*(0.0,) * 11, 1.0), "time/step": (5.0, 1.0, 2.0)},
    )
    found = summary_of(run, target=0.9)
    assert (found.ess_low, found.kl_high, found.seconds_a_step) == (0.9, 0.1, 2.0)
    assert means([1.0, None, 3.0], 2) == [2.0] and means([1.0], 2) == []


def test_what_is_not_known_has_no_number() -> None:
    at_once = summary_of(record(accuracy=(0.9, 0.9, 0.9)), target=0.9)
    assert (at_once.steps_to, at_once.process_seconds_to) == (0, 0.0)
    unknown = summary_of(record(process_seconds=(None, None, 14.0, 16.0)), target=0.6)
    assert (unknown.steps_to, unknown.process_seconds_to, unknown.process_seconds_a_step) == (2, None, None)
    longer = record(evaluated=(0, 1, 2, 4), accuracy=(0.0, 0.3, 0.6, 0.9))
    assert summary_of(longer, target=0.9).final == pytest.approx(0.6)  # of the last three
    nothing = summary_of(record(evaluated=(), accuracy=(), step=(), process_seconds=(), series={}), target=0.9)
    assert set(dataclasses.asdict(nothing).values()) == {None}


def test_a_band_over_seeds() -> None:
    assert band([1.0, None, 3.0]) == Band(2.0, 1.0, 3.0, 2, 3)
    assert band([None]) is None


def cells(text: str, row: int, table: int = 0) -> list[str]:
    """Cells of a row, 0 the names, of the tables in ``text``."""
    blocks = [block for block in text.split("\n\n") if block.startswith("|")]
    return [cell.strip() for cell in blocks[table].splitlines()[row].strip("|").split("|")]


def test_the_tables_of_two_methods() -> None:
    fell = record("tis", seed=1, accuracy=(0.9, 0.9, 0.1), series={})
    text = report([record(), record(seed=1, accuracy=(0.3, 0.5, 0.7)), fell], target=0.9)
    assert cells(text, 0)[5:9] == ["final", "best", "turned at", "steps to 0.9"]
    assert cells(text, 2) == [
        *("vcpo", "16", "0.001", "4", "2", "0.550 (0.500-0.600)", "0.800 (0.700-0.900)", "-"),
        *("4, 1 of 2", "16, 1 of 2", "4.00", "-"),
    ]
    assert cells(text, 3) == [
        *("tis", "16", "0.001", "4", "1", "0.633", "0.900", "2", "0", "0", "4.00", "-"),
    ]
    assert cells(text, 2, table=1)[5] == "0.80" and cells(text, 3, table=1)[5] == "-"
    assert "best rate" not in text


def test_each_method_s_best_rate() -> None:
    runs = [record(rate=rate, accuracy=(rate, rate, rate)) for rate in (0.1, 0.3, 0.2)]
    text = report([*runs, record("tis", rate=0.1)], target=0.9)
    assert cells(text, 0, table=2) == ["method", "lag", "steps", "rates", "best rate", "final there"]
    assert cells(text, 2, table=2) == ["vcpo", "16", "4", "0.1, 0.2, 0.3", "0.3", "0.300"]


def test_runs_that_are_not_done_have_a_line() -> None:
    failed = record(seed=1, status="failed", reason="server 0 died", step=(0, 1))
    text = report([record(), failed, record(seed=2, status="stopped", reason="SIGINT")], target=0.9)
    assert cells(text, 2)[4] == "1"
    first, second = text.splitlines()[-2:]
    assert_names(first, "vcpo", "seed 1", "failed", "2 of 4 steps", "server 0 died")
    assert_names(second, "vcpo", "seed 2", "stopped", "4 of 4 steps", "SIGINT")


def test_one_run_a_seed_and_those_of_the_spec() -> None:
    old, new = record(digest="old", accuracy=(0.1, 0.1, 0.1)), record(digest="new")
    text = report([old, new], target=0.9)
    assert cells(text, 2)[4:6] == ["1", "0.600"] and "left out" in text.splitlines()[-1]
    assert cells(report([old, new], {"old"}, target=0.9), 2)[5] == "0.100"
    assert report([old], {"new"}, target=0.9) == report([], target=0.9)
