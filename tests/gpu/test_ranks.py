"""What becomes of a check that hangs, misses a limit, or fails: it ends in time, and the next one finds ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.learner.world import run_world

from .checklist import Check, Outcome, Place
from .ranks import Ranks, reason


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks("tests.gpu.stand_ins:ready")
    yield made
    made.close()


def call(ranks: Ranks, folder: Path, name: str, seconds: float = 100.0, **arguments: Any) -> Outcome:
    check = Check(name, f"tests.gpu.stand_ins:{name}", 1.0)
    return ranks.run(check, Place(folder, seconds, 0), 250.0, arguments)


@pytest.mark.timeout(300)
def test_a_hang_ends_in_time_and_costs_no_other_check(ranks: Ranks, tmp_path: Path) -> None:
    first = call(ranks, tmp_path, "good", word="well")
    assert (first.state, first.text) == ("passed", f"well in {tmp_path.name}"), first.log
    assert first.figures["seconds"] == 100  # the start has taken nothing of it
    missed, skipped = call(ranks, tmp_path, "misses"), call(ranks, tmp_path, "skips")
    assert (missed.state, missed.text) == ("failed", "half 0.5, allowed 0.25")
    assert (skipped.state, skipped.text) == ("skipped", "needs the moon")
    note = tmp_path / "pid"
    hung = call(ranks, tmp_path, "hangs", seconds=2.0, note=note)
    assert hung.state == "failed" and "no end after" in hung.text
    assert "in hangs" in hung.log and "time.sleep" not in hung.text  # where every thread was
    assert int(note.read_text()) == first.figures["pid"]  # neither a limit nor a skip has cost the rank
    assert not psutil.pid_exists(int(note.read_text()))
    again = call(ranks, tmp_path, "good", word="again")
    assert again.state == "passed" and again.figures["pid"] != first.figures["pid"]


@pytest.mark.timeout(300)
def test_a_check_that_fails_says_why(ranks: Ranks, tmp_path: Path) -> None:
    failed = call(ranks, tmp_path, "raises")
    assert (failed.state, failed.text) == ("failed", "ValueError: 7 is no prime of this kind")
    assert "stand_ins.py" in failed.log


def test_the_reason_is_the_last_error_of_a_rank() -> None:
    log = "f on 2 ranks failed\n--- rank 0\nTraceback\nKeyError: 'a'\n--- rank 1\ntorch.OutOfMemoryError: 3 GiB\nmore\n"
    assert reason(log) == "torch.OutOfMemoryError: 3 GiB"
    late = "f on 2 ranks: no end after 3 s\n"
    assert reason(late + "ValueError: b").startswith("no end after 3 s;")
    assert reason("f on 1 ranks failed\nKilled") == "f on 1 ranks failed"


#: Checks of the script as they run in its CPU form, that need nothing of transformers.
REAL = ("attention:values", "large:finite_gradients", "large:many_logits")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", REAL)
def test_their_code_on_a_cpu(name: str, tmp_path: Path) -> None:
    arguments = {"function": f"tests.gpu.checks.{name}", "place": Place(tmp_path, 100.0, 0), "arguments": {}}
    outcome = run_world(1, "tests.gpu.ranks:run_check", arguments)
    assert outcome["state"] == "passed", outcome["text"]
