"""The record of a run: made from its directory, added to a file, read back."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.comparison.records import record
from tests.comparison.specs import written_spec
from tests.messages import assert_names
from vcpo_megatron.comparison.matrix import planned_runs
from vcpo_megatron.comparison.results import appended, newest, read_records, record_of
from vcpo_megatron.comparison.spec import load_spec
from vcpo_megatron.run.directory import RunDirectory
from vcpo_megatron.run.errors import ConfigError

ROWS = (
    {"step": 0, "ess/ratio": 0.123456, "grad_norm/trajectory_max": None, "eval/accuracy": 0.25, "eval/version": 0}
    | {"eval/samples": 512},
    {"step": 1, "ess/ratio": None, "grad_norm/trajectory_max": None},
    {"step": 2, "ess/ratio": 1.0, "eval/accuracy": 0.5, "eval/version": 3},
)


def test_a_record_is_what_the_run_directory_holds(tmp_path: Path) -> None:
    run = planned_runs(load_spec(written_spec(tmp_path)))[0]
    directory = RunDirectory(tmp_path)
    directory.metrics.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    made = record_of(
        run, directory, comparison="spec", status="failed", reason="a server died", cost={0: 1.5, 2: 2.0000001}
    )
    assert (made.status, made.reason, made.digest, made.steps) == ("failed", "a server died", run.digest, 40)
    assert (made.evaluated, made.accuracy, made.samples) == ((0, 3), (0.25, 0.5), (512, 0))
    assert made.step == (0, 1, 2) and made.process_seconds == (1.5, None, 2.0)
    assert made.series == {"ess/ratio": (0.1235, None, 1.0)}  # nothing that is nowhere known
    assert made.config["optimizer.lr"] == "0.001" and made.config["staleness.lag"] == '"exact"'
    assert not any(str(tmp_path) in str(text) or "examples" in str(text) for text in made.config.values())
    assert made.versions["torch"] and made.machine["cores"] >= 1 and made.seconds is None


def test_records_come_back_from_their_file(tmp_path: Path) -> None:
    first, second = record(seconds=3.5), record(seed=1)
    with appended(tmp_path / "results.jsonl") as results:
        results.add(first)
    with appended(tmp_path / "results.jsonl") as results:
        results.add(second)
    assert read_records([tmp_path]) == read_records([tmp_path / "results.jsonl"]) == [first, second]


def test_a_torn_line_is_passed_over_and_then_cut(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with appended(path) as results:
        results.add(record())
    with open(path, "a") as file:
        file.write('{"digest": "half')
    assert read_records([path]) == [record()]
    with appended(path) as results:
        results.add(record(seed=1))
    assert read_records([path]) == [record(), record(seed=1)]


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n')
    with pytest.raises(ConfigError) as caught:
        read_records([path])
    assert_names(caught.value, path, "line 1")
    with pytest.raises(ConfigError) as caught:
        read_records([tmp_path])
    assert_names(caught.value, tmp_path / "results.jsonl")


def test_one_process_at_a_time_adds(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    with appended(path), pytest.raises(ConfigError, match="--out"), appended(path):
        pass


def test_no_value_that_json_does_not_know(tmp_path: Path) -> None:
    with appended(tmp_path / "results.jsonl") as results, pytest.raises(ValueError):
        results.add(record(seconds=math.nan))


def test_the_newest_counts_but_a_finished_one_stays() -> None:
    failed, done, stopped = record(status="failed"), record(), record(status="stopped")
    assert newest([failed, stopped]) == {done.digest: stopped}
    assert newest([failed, done, stopped]) == {done.digest: done}
    again = record(accuracy=(0.3, 0.6, 1.0))
    assert newest([done, again]) == {done.digest: again}
