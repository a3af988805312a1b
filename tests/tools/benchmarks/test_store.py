"""The store's benchmark writes what it says it writes, and prints the keys that scripts read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import store

from vcpo_megatron.orchestrator.store.store import RolloutStore

ROOT = Path(__file__).resolve().parents[3]


def test_a_steady_pace_is_kept_and_everything_is_trained(tmp_path: Path) -> None:
    found = store.offer(tmp_path, groups=16, size=4, tokens=32, groups_per_minute=600.0)
    assert found.groups_per_minute <= 600 * 64 / 63 + 1  # the last of 64 trajectories is due after 63 intervals
    assert 0 < found.median_s <= found.p99_s
    assert 0 < found.transactions_per_group <= 4 + 1 + 1 / 8 + 1  # a trajectory, an admission, a step, the opening
    with RolloutStore.open_readonly(tmp_path / "offered.sqlite") as read:
        assert (read.counts().trained, read.counts().queued, read.steps_done()) == (64, 0, 2)


@pytest.mark.parametrize("writers", [1, 8])
def test_writers_that_end_together_share_transactions(writers: int, tmp_path: Path) -> None:
    found = store.measure(tmp_path, groups=16, size=4, tokens=32, writers=writers)
    # alone: one for each of 4 trajectories and, a step of 8 groups, one for their admission and one for the mark
    assert found.transactions_per_group == 4.25 if writers == 1 else found.transactions_per_group < 2.5
    with RolloutStore.open_readonly(tmp_path / f"rollouts-{writers}.sqlite") as read:
        assert (read.counts().trained, read.steps_done()) == (64, 2)


def test_the_tool_prints_one_json_object() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools/bench_store.py", "--groups", "16", "--tokens", "64", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["benchmark"] == "store" and found["target_groups_per_minute"] == 2000
    assert [result["writers"] for result in found["results"]] == [1, 8, 64]
    assert found["offered"]["offered"] == 2000 and found["offered"]["groups_per_minute"] > 0
