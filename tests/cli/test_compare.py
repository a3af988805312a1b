"""``vcpo compare``: what it refuses, lists, runs and reports; the runs themselves are stand-ins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.commands import errors
from tests.comparison.records import record
from tests.comparison.specs import EXAMPLE, SPEC
from tests.comparison.test_runner import Fake
from tests.messages import assert_names
from vcpo_megatron.cli import compare
from vcpo_megatron.cli import main as cli
from vcpo_megatron.comparison import runner
from vcpo_megatron.comparison.matrix import planned_runs
from vcpo_megatron.comparison.results import appended, read_records
from vcpo_megatron.comparison.spec import load_spec
from vcpo_megatron.launch import devices


@pytest.fixture
def spec(toml: Path) -> Path:
    """A comparison of ``toml`` by two methods and two seeds."""
    path = toml.parent / "mine.toml"
    path.write_text(SPEC.format(example="run.toml"))
    return path


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Takes the place of processes."""
    fake = Fake()
    monkeypatch.setattr(compare, "_Processes", lambda: fake)
    monkeypatch.setattr(runner, "POLL_S", 0.0)
    return fake


def test_a_dry_run_lists_what_would_run(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", str(spec), "--dry-run", "--jobs", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["vcpo, lag 16, rate 0.001, seed 0", "synchronous, lag 0, rate 0.001, seed 0"]
    assert_names(lines[4], 4, 40, 3, "runs/compare-mine/results.jsonl")
    assert not Path("runs").exists()


def test_every_run_is_checked_before_the_first_one(
    spec: Path, processes: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    spec.write_text(spec.read_text() + 'set.algorithm.opob_mode = "proxy"\n')
    assert cli.main(["compare", str(spec)]) == 2
    (line,) = errors(capsys)
    assert_names(line, "2 of 4 runs", "synchronous", "algorithm.opob_mode")
    assert processes.started == []


def test_runs_are_made_once_and_reported(spec: Path, processes: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", str(spec), "--jobs", "1"]) == 0
    shown = capsys.readouterr().out
    folder = Path("runs/compare-mine")
    assert len(read_records([folder])) == len(processes.started) == 4
    table = (folder / "report.md").read_text()
    assert table in shown and table.count("| 0.750 | 0.750 |") == 2  # final and best of both methods
    assert [path.name for path in (folder / "figures").iterdir() if path.name.startswith("final")] == []
    assert (folder / "figures" / "accuracy-lag16-rate0.001.svg").read_text().startswith("<svg ")
    assert cli.main(["compare", str(spec)]) == 0 and len(processes.started) == 4
    for paths in ([spec], [folder], [folder / "results.jsonl"]):
        capsys.readouterr()
        assert cli.main(["compare", *map(str, paths), "--report"]) == 0
        assert capsys.readouterr().out == table


def test_a_failed_run_is_the_exit_code(spec: Path, processes: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    processes.code = lambda name: 1
    assert cli.main(["compare", str(spec), "--out", "here"]) == 1
    assert [one.status for one in read_records([Path("here")])] == ["failed"] * 4
    assert capsys.readouterr().out.splitlines()[-1].startswith("- synchronous, lag 0, rate 0.001, seed 1: failed")


def test_results_of_several_comparisons_are_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rate in (("one", 0.1), ("two", 0.2)):
        with appended(tmp_path / name / "results.jsonl") as results:
            results.add(record(rate=rate))
    words = [str(tmp_path / "one"), str(tmp_path / "two"), "--report", "--figures", str(tmp_path / "svg")]
    assert cli.main(["compare", *words]) == 0
    assert "final-rates.svg" in {path.name for path in (tmp_path / "svg").iterdir()}
    assert "| 0.1, 0.2 | 0.1 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["a.toml", "b.toml"], ("b.toml",)),
        (["a.toml"], ("a.toml",)),
        (["a", "--report"], ("a", "results.jsonl")),
        (["a", "--report", "--jobs", "2"], ("--jobs",)),
        (["a.toml", "--figures", "b"], ("--figures", "--report")),
        (["a", "--variance"], ("a/resolved.toml",)),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str],
    named: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", *words]) == 2
    assert_names("\n".join(errors(capsys)), *named)


def test_a_comparison_under_way_keeps_others_out(
    spec: Path, processes: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    with appended(Path("runs/compare-mine/results.jsonl")):
        assert cli.main(["compare", str(spec)]) == 2
    assert_names("\n".join(errors(capsys)), "runs/compare-mine/results.jsonl", "--out")
    assert processes.started == []


@pytest.mark.parametrize(("cores", "jobs", "slots"), [(2, None, 1), (9, None, 3), (1, None, 1), (2, 5, 5)])
def test_runs_share_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, jobs: int | None, slots: int
) -> None:
    """A run of the example has two learner ranks and a server."""
    monkeypatch.setattr(devices, "visible_gpus", lambda: ())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    (tmp_path / "spec.toml").write_text(SPEC.format(example=EXAMPLE))
    runs = planned_runs(load_spec(tmp_path / "spec.toml"))
    assert compare._slots(runs, jobs) == [{}] * slots


def test_runs_have_gpus_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two learner ranks take two; the embedded engine takes none."""
    monkeypatch.setattr(devices, "visible_gpus", lambda: ("0", "1", "2", "3", "4"))
    (tmp_path / "spec.toml").write_text(SPEC.format(example=EXAMPLE))
    runs = planned_runs(load_spec(tmp_path / "spec.toml"))
    assert compare._slots(runs, None) == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    with pytest.raises(ValueError, match="--jobs 3"):
        compare._slots(runs, 3)
