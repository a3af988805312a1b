"""Budgets, the total time and what is skipped for want of it."""

from __future__ import annotations

import pytest

from tests.messages import assert_names

from .checklist import Check, Missed, Outcome, chosen, require, run_checks


class Run:
    """A clock, and checks that take as long as ``takes`` says of them."""

    def __init__(self, takes: dict[str, float]) -> None:
        self.now, self.takes = 100.0, takes
        self.given: list[tuple[str, float]] = []

    def clock(self) -> float:
        return self.now

    def run(self, check: Check, seconds: float, left: float) -> Outcome:
        assert seconds <= left
        self.given.append((check.name, seconds))
        self.now += min(seconds, self.takes[check.name])
        return Outcome(check.name, "passed", "")


def checks(**budgets: float) -> list[Check]:
    return [Check(name, "nowhere:nothing", seconds) for name, seconds in budgets.items()]


def test_a_check_starts_while_half_of_its_budget_is_left_and_gets_no_more_than_that() -> None:
    run = Run({"a": 35.0, "b": 55.0, "c": 1.0, "d": 1.0})
    outcomes = list(run_checks(checks(a=40, b=60, c=24, d=20), 100.0, 1.0, run.run, run.clock))
    # 100 - 35 - 55 = 10 s are left: c wants 12 at least, d has 10
    assert run.given == [("a", 40), ("b", 60), ("d", 10)]
    assert [(o.name, o.state, o.seconds) for o in outcomes] == [
        ("a", "passed", 35),
        ("b", "passed", 55),
        ("c", "skipped", 0),
        ("d", "passed", 1),
    ]
    assert_names(outcomes[2].text, "10 s of 100 s", "24 s")


def test_checks_that_hang_take_no_longer_than_the_total() -> None:
    run = Run(dict.fromkeys("abcd", 1e9))
    outcomes = list(run_checks(checks(a=30, b=30, c=30, d=30), 100.0, 1.0, run.run, run.clock))
    assert run.given == [("a", 30), ("b", 30), ("c", 30)] and run.now == 190
    assert [o.state for o in outcomes] == ["passed", "passed", "passed", "skipped"]


def test_budgets_grow_with_the_time_that_is_given() -> None:
    run = Run({"a": 5.0})
    list(run_checks(checks(a=40), 1000.0, 2.5, run.run, run.clock))
    assert run.given == [("a", 100)]


def test_a_number_that_is_none_misses_its_limit() -> None:
    assert require(0.001, 0.25, "norm") == "norm 1.0e-03 (allowed 0.25)"
    for value in (0.26, float("nan")):
        with pytest.raises(Missed, match="norm"):
            require(value, 0.25, "norm")


def test_checks_are_chosen_by_a_word_of_their_name() -> None:
    found = checks(**{"layout PP 2": 1, "layout TP 2": 1, "what fits": 1})
    assert [c.name for c in chosen(found, ["PP", "fits"])] == ["layout PP 2", "what fits"]
    assert chosen(found, []) == found and chosen(found, ["XP"]) == []
