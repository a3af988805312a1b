"""Collected problems and fingerprints."""

import pytest

from vcpo_megatron.environments.base import EnvironmentSetupError, Problems, fingerprint


def test_problems_are_collected_and_raised_together():
    problems = Problems()
    with problems.collect():
        raise EnvironmentSetupError("first", "second")
    with problems.collect():
        pass
    with problems.collect():
        raise EnvironmentSetupError("third")
    with pytest.raises(EnvironmentSetupError) as caught:
        problems.raise_if_any()
    assert caught.value.problems == ("first", "second", "third")
    assert str(caught.value) == "first; second; third"


def test_no_problem_raises_nothing_and_other_errors_pass():
    problems = Problems()
    problems.raise_if_any()
    with pytest.raises(KeyError), problems.collect():
        raise KeyError("a bug, not a setting")


def test_fingerprint_depends_on_every_part_and_its_borders(tmp_path):
    file = tmp_path / "data"
    file.write_text("ab")
    prints = [
        fingerprint("ab", 1),
        fingerprint("ab", 2),
        fingerprint("a", "b1"),
        fingerprint("a", "b", 1),
        fingerprint(None),
        fingerprint(file),
        fingerprint(),
    ]
    assert len(set(prints)) == len(prints)
    before = fingerprint(file)
    file.write_text("ac")
    assert fingerprint(file) != before
    assert fingerprint("ab", 1) == prints[0] and len(prints[0]) == 16
