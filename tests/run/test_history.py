"""The history of a run says what its configuration must hold, whichever checkpoint it goes back to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vcpo_megatron.run.directory import Manifest, RunDirectory
from vcpo_megatron.run.history import Recorded, last_step, record, recorded


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def complete(directory: RunDirectory, step: int, attempt: int, **values: str | None) -> None:
    directory.checkpoint(step).mkdir(parents=True)
    manifest = Manifest(step=step, attempt=attempt, version_number=step, learner={}, orchestrator={}, config=values)
    directory.complete(step, manifest)


def lines(directory: RunDirectory) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in directory.history.read_text().splitlines()]
    assert all(line.pop("time").endswith("+00:00") for line in found)
    return found


def test_a_start_two_resumes_and_what_each_checkpoint_then_asks_for(directory: RunDirectory) -> None:
    record(directory, attempt=1, step=None, values={"lr": "1.0", "k": "4", "s": None})
    complete(directory, 2, 1, lr="1.0", k="4", s=None)
    record(directory, attempt=2, step=2, values={"lr": "0.5", "k": "4", "s": None})
    complete(directory, 4, 2, lr="0.5", k="4", s=None)
    record(directory, attempt=3, step=4, values={"lr": "0.5", "k": "6", "s": "9"})
    assert lines(directory) == [
        {"event": "start", "attempt": 1, "step": 0, "values": {"lr": "1.0", "k": "4", "s": None}},
        {"event": "resume", "attempt": 2, "step": 2},
        {"event": "change", "attempt": 2, "step": 2, "key": "lr", "old": "1.0", "new": "0.5"},
        {"event": "resume", "attempt": 3, "step": 4},
        {"event": "change", "attempt": 3, "step": 4, "key": "k", "old": "4", "new": "6"},
        {"event": "change", "attempt": 3, "step": 4, "key": "s", "old": None, "new": "9"},
    ]
    now = {"lr": "0.5", "k": "6", "s": "9"}
    assert [recorded(directory, step).values for step in (2, 4, None)] == [now] * 3


def test_a_run_that_has_recorded_nothing_asks_for_nothing(directory: RunDirectory) -> None:
    assert recorded(directory, None) == Recorded() and list(Recorded().differing({"lr": "1.0"})) == []


def test_what_is_torn_counts_for_nothing_and_is_written_over(directory: RunDirectory) -> None:
    record(directory, attempt=1, step=None, values={"lr": "1.0"})
    with open(directory.history, "a") as file:
        file.write('{"event": "change", "attempt": 2, "key": "lr", "old": "1.0", "ne')
    assert recorded(directory, None).values == {"lr": "1.0"}
    record(directory, attempt=3, step=None, values={"lr": "2.0"})
    assert [line["event"] for line in lines(directory)] == ["start", "resume", "change"]


def test_a_death_between_the_line_and_the_copy_leaves_either_value(directory: RunDirectory) -> None:
    """The line is written first; the copy of an attempt that died then still has the old value, which goes on."""
    record(directory, attempt=1, step=None, values={"lr": "1.0"})
    record(directory, attempt=2, step=None, values={"lr": "0.5"})
    known = recorded(directory, None)
    assert [list(known.differing({"lr": value})) for value in ("0.5", "1.0", "0.7")] == [[], [], ["lr"]]
    record(directory, attempt=3, step=None, values={"lr": "1.0"})  # as it was found
    assert lines(directory)[-1] == {"event": "change", "attempt": 3, "step": 0, "key": "lr", "old": "0.5", "new": "1.0"}
    record(directory, attempt=4, step=None, values={"lr": "1.0"})
    complete(directory, 2, 4, lr="1.0")
    assert list(recorded(directory, 2).differing({"lr": "0.5"})) == ["lr"]


def test_a_disk_that_takes_nothing_is_named(directory: RunDirectory, file_size_limit: Any) -> None:
    record(directory, attempt=1, step=None, values={"lr": "1.0"})
    before = directory.history.read_bytes()
    with file_size_limit(len(before)), pytest.raises(OSError) as caught:
        record(directory, attempt=2, step=None, values={"lr": "2.0"})
    assert caught.value.filename == str(directory.history)
    assert recorded(directory, None).values == {"lr": "1.0"}


@pytest.mark.parametrize(
    "line",
    [
        '{"event": "change", "attempt": 9}',
        '{"event": "change", "attempt": "9", "step": 0, "key": "lr", "old": "1.0", "new": "2.0"}',
        '{"event": "change", "attempt": 9, "step": null, "key": "lr", "old": "1.0", "new": "2.0"}',
        '{"event": "change", "attempt": 9, "step": 0, "key": ["lr"], "old": "1.0", "new": "2.0"}',
        '{"event": "change", "attempt": 9, "step": 0, "key": "lr", "old": "1.0", "new": {}}',
        '{"event": "start", "attempt": 1, "step": 0}',
        '{"event": "start", "attempt": 1, "step": 0, "values": [["lr", "2.0"]]}',
        '{"event": ["change"], "attempt": 9, "step": 0}',
        '{"event": "resume", "attempt": 9, "step": "40"}',
        '["event", "attempt"]',
        "[" * 100_000,
        '{"event": "resume", "attempt": %s, "step": 0}' % ("9" * 5000),
    ],
)
def test_a_damaged_line_counts_for_nothing(directory: RunDirectory, line: str) -> None:
    record(directory, attempt=1, step=None, values={"lr": "1.0"})
    with open(directory.history, "a") as file:
        file.write(line + "\n")
    assert recorded(directory, None).values == {"lr": "1.0"} and last_step(directory) == 0
    record(directory, attempt=10, step=None, values={"lr": "3.0"})
    assert recorded(directory, None) == Recorded({"lr": "3.0"}, {"lr": "1.0"})
