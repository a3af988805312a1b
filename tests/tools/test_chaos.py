"""Each fault once, on two embedded servers of a run."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from benchmarks import chaos
from benchmarks.soak import Account

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_run_survives_each_fault_of_a_server(tmp_path: Path) -> None:
    tool = ROOT / "tools" / "chaos.py"
    command = [sys.executable, str(tool), "--quick", "--json", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["faults"] == {"killed": 1, "stopped": 1, "refused": 1} and outcome["clean"]
    assert outcome["lost"] == outcome["duplicated"] == outcome["violations"] == outcome["failed"] == 0
    assert outcome["trained"] + outcome["dropped"] == outcome["generated"] and outcome["trained"] > 0
    assert outcome["deaths"] == 2 and outcome["refusals"] == 1 and outcome["mismatch"] < 1e-3
    assert outcome["wrong_version"] == 0 and outcome["compared"] > 0
    assert [kind for kind, _ in outcome["recovery_s"]] == ["killed", "stopped", "refused"]


def test_faults_that_cost_little_make_up_for_lost_time() -> None:
    """20 faults in all: at half of the time, 8 are too few and 12 are not."""
    rng = random.Random(0)
    kinds = [chaos.next_kind(rng, Counter(killed=4, stopped=3, refused=1), 20, 0.5) for _ in range(20)]
    assert set(kinds) == {"refused"}
    kinds = [chaos.next_kind(rng, Counter(killed=4, stopped=4, refused=4), 20, 0.5) for _ in range(40)]
    assert set(kinds) == {"killed", "stopped", "refused"}
    assert chaos.next_kind(rng, Counter(killed=1), 20, 0.5) == "stopped"


def outcome(**changes: Any) -> chaos.ChaosReport:
    found = Account(100, 6400, 6400, 0, 0, 0, 0, 0, {})
    recovery = [("killed", 40.0), ("refused", 3.0), ("killed", 60.0)]
    whole: dict[str, Any] = {
        "found": found,
        "faults": {"killed": 2, "refused": 1},
        "recovery_s": recovery,
        "mismatch": 2e-6,
        "compared": 500,
        "wrong_version": 0,
        "deaths": 2,
        "refusals": 1,
    }
    return chaos.ChaosReport(**{**whole, **changes})


def test_the_account_shows_every_recovery() -> None:
    table = outcome().table()
    assert "    50.0 s median, 60.0 s at most after killed (40, 60)" in table
    assert "     3.0 s median, 3.0 s at most after refused (3)" in table and "over 500 tokens" in table


@pytest.mark.parametrize("changes", [{"wrong_version": 1}, {"compared": 0}, {"deaths": 1}])
def test_a_run_that_went_wrong_is_not_clean(changes: dict[str, int]) -> None:
    assert outcome().is_clean and not outcome(**changes).is_clean
