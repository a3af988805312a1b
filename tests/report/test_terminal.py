"""What ``vcpo report`` prints by step, and with which options it prints trajectories instead."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.messages import assert_names
from tests.orchestrator.store.test_store import V0, sample_group, trajectory
from tests.orchestrator.store.test_store_policies import report, train
from vcpo_megatron.cli import main as cli
from vcpo_megatron.orchestrator.store.records import HeldOutSample
from vcpo_megatron.orchestrator.store.store import RolloutStore
from vcpo_megatron.report.tables import aligned
from vcpo_megatron.report.terminal import steps_a_row
from vcpo_megatron.run.text import printable
from vcpo_megatron.types import PolicyVersion

pytestmark = pytest.mark.timeout(60)

HEAD = "step groups trained dropped failed staleness/max reward/mean tokens"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rollouts.sqlite"


def words(lines: list[str]) -> list[str]:
    return [" ".join(line.split()) for line in lines]


def test_the_summary_by_step(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RolloutStore(path) as store:
        for group in range(4):
            sample_group(store, group)
        store.admit(4, "p4", 4, 2, V0)
        store.replace(4, 0, "tool crashed", 2)
        for sample in (1, 2):  # rewards 0.25 and 0.5; four tokens each, of two versions
            store.add_trajectory(trajectory(4, sample, V0, PolicyVersion(1, 1)))
        train(store, 0, 0, 1)
        store.drop(2, "expired")
        store.mark_trained(1, [], [4], [1])
        store.mark_trained(2, [], [3], [2], skipped="non-finite step")
        sample_group(store, 5, PolicyVersion(1, 2), size=3)
        store.drop(5, "expired")
        store.admit(6, "p6", 6, 2, V0)
        store.fail(6, 0, "HTTP 503")
        store.admit(7, "p7", 7, 2, V0)
        store.replace(7, 0, "tool crashed", 2)
    code, lines = report(capsys, path)
    assert code == 0 and words(lines) == [
        HEAD,
        "0 2 4 0 0 0 0.125 8",
        "1 1 2 2 1 1 0.375 8",
        "2 0 0 2 0 - - -",
        "- 0 0 4 2 - - -",
        "generated 19, queued 2, trained 6, dropped 8, failed 3",
        "1 dropped: a member failed",
        "5 dropped: expired",
        "2 dropped: non-finite step",
        "1 failed: HTTP 503",
        "2 failed: tool crashed",
    ]
    assert {len(line) for line in lines[:5]} == {len(lines[0])}  # columns are aligned


def test_a_long_run_has_several_steps_a_row(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RolloutStore(path) as store:
        for step in range(5):
            sample_group(store, step)
            train(store, step, step)
        store.prune_samples(1)
    totals = "generated 10, queued 0, trained 10, dropped 0, failed 0"
    assert words(report(capsys, path, "--rows", "3")[1]) == [
        HEAD,
        "0-1 2 4 0 0 1 0.125 -",  # the tokens of step 0 are pruned
        "2-3 2 4 0 0 3 0.125 8",
        "4 1 2 0 0 4 0.125 4",
        "2 steps a row: --rows 5 shows each, --step N the trajectories of one",
        totals,
    ]
    each = words(report(capsys, path, "--rows", "5")[1])
    assert [line.split()[0] for line in each[1:-1]] == ["0", "1", "2", "3", "4"] and each[-1] == totals
    assert each == words(report(capsys, path)[1])


@pytest.mark.parametrize(
    ("steps", "most", "size"),
    [(0, 40, 1), (40, 40, 1), (41, 40, 2), (80, 40, 2), (81, 40, 5), (360, 40, 10), (100_000, 40, 5000), (7, 1, 10)],
)
def test_steps_fit_into_the_rows(steps: int, most: int, size: int) -> None:
    assert steps_a_row(steps, most) == size


def test_a_store_without_anything_has_totals(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RolloutStore(path):
        pass
    code, lines = report(capsys, path)
    assert (code, words(lines)) == (0, [HEAD, "generated 0, queued 0, trained 0, dropped 0, failed 0"])


@pytest.mark.parametrize("options", [("--trajectories",), ("--data",), ("--step", "0"), ("--prompt", "p1")])
def test_trajectories_are_printed_when_asked_for(
    path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    with RolloutStore(path) as store:
        sample_group(store, 0)
        sample_group(store, 1)
        train(store, 0, 1)
    _, lines = report(capsys, path, *options)
    of_one = ["0 p1 0 trained 0 0 0.6 0.125", "0 p1 1 trained 0 0.25 0.6 0.125"]
    of_all = [*of_one, "- p0 0 sampled - 0 - -", "- p0 1 sampled - 0.25 - -"]
    assert words(lines)[1:-1] == (of_all if options[0] in ("--trajectories", "--data") else of_one)


@pytest.mark.parametrize("text", ["red \x1b[31m", "half \ud83d, \x1b[2J and \x00", "two\nlines\x9b"])
@pytest.mark.parametrize("options", [(), ("--trajectories",), ("--eval",), ("--step", "0")])
def test_a_terminal_obeys_nothing_that_a_policy_wrote(
    path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], text: str
) -> None:
    with RolloutStore(path) as store:
        store.admit(0, text, 0, 2, V0)
        for sample in (0, 1):
            store.add_trajectory(trajectory(0, sample, V0, prompt_id=text))
        train(store, 0, 0)
        store.admit(1, text, 1, 2, V0)
        store.fail(1, 0, text)
        store.add_evaluation(0, [HeldOutSample(0, text, reason=f"prompt {text}")])
    code = cli.main(["report", str(path.parent), *options])
    said = capsys.readouterr().out
    assert code == 0 and all(line.isprintable() for line in said.split("\n"))
    assert printable(text) in said


@pytest.mark.parametrize("rows", ["0", "-1", "x"])
def test_rows_are_one_at_least(path: Path, capsys: pytest.CaptureFixture[str], rows: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        report(capsys, path, f"--rows={rows}")
    assert f"'{rows}' is no positive integer" in capsys.readouterr().err


def test_rows_are_of_the_summary(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RolloutStore(path):
        pass
    refused = "vcpo: error: --rows bounds the rows of steps, and here trajectories are asked for; leave it out"
    assert report(capsys, path, "--rows", "3", "--json") == (2, [refused])


FIRST = {"step": 0, "loss": -0.5, "reward/mean": 0.25, "ess/ratio": 1.0, "lr/effective": 1e-6, "kl/behavior": 0.001}
SECOND = {"step": 1, "loss": 0.25, "reward/mean": 0.75, "ess/ratio": 0.5, "lr/effective": 7.1e-7, "kl/behavior": 0.003}
TIMES = ("time/step", "time/wait_batch", "time/forward_backward", "time/sync", "eval/accuracy")
METRICS = [
    FIRST | dict(zip(TIMES, (12.0, 2.0, 9.0, 1.5, 0.125), strict=True)),
    SECOND | dict(zip(TIMES, (8.0, 0.0, 7.0, None, None), strict=True)),
    {"step": 2, "loss": 0.125},
]
LEARNED = "step accuracy reward loss lr ESS KL s/step s/wait s/train s/sync"


def learned(path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    with RolloutStore(path) as store:
        for step in range(3):
            sample_group(store, step)
            train(store, step, step)
    path.with_name("metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in METRICS) + "no row\n")
    lines = words(report(capsys, path, *arguments)[1])
    return lines[lines.index("") + 1 :]


def test_how_well_it_learned_by_step(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert learned(path, capsys)[:4] == [
        LEARNED,
        "0 0.1250 0.250 -0.5 1.0e-06 1.00 0.001 12.0 2.0 9.0 1.5",
        "1 - 0.750 0.25 7.1e-07 0.50 0.003 8.0 0.0 7.0 -",
        "2 - - 0.12 - - - - - - -",
    ]


def test_how_well_it_learned_by_several_steps(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Means, but for accuracy and rate: the newest."""
    assert learned(path, capsys, "--rows", "2")[:3] == [
        LEARNED,
        "0-1 0.1250 0.500 -0.12 7.1e-07 0.75 0.002 10.0 1.0 8.0 1.5",
        "2 - - 0.12 - - - - - - -",
    ]


@pytest.mark.parametrize(
    ("line", "row"),
    [
        ('{"step": 2, "loss": %s}' % ("9" * 400), "2 - - - - - - - - - -"),
        ('{"step": 2, "loss": -%s, "eval/accuracy": 0.5}' % ("9" * 5000), "2 0.5000 - - - - - - - - -"),
        ('{"step": 2, "loss": 1%s}' % ("0" * 20), "2 - - 1e+20 - - - - - - -"),
        ('{"step": %s, "loss": 1.0}' % ("9" * 400), None),
        ("[" * 100_000, None),
        ('{"step": 2, "loss": 1.5e308}\n{"step": 2, "loss": 1.5e308}', "2 - - 1.5e+308 - - - - - - -"),
    ],
)
def test_a_number_that_no_run_wrote_is_no_obstacle(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, row: str | None
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "METRICS", METRICS[:2])
    learned(path, capsys)
    with open(path.with_name("metrics.jsonl"), "a") as file:
        file.write(line + "\n")
    code, lines = report(capsys, path)
    found = words(lines)[words(lines).index(LEARNED) + 3 : -1]
    assert (code, found) == (0, [] if row is None else [row])


@pytest.mark.parametrize("step", [10**23 - 1, 2**63, -(2**63) - 1, -1])
@pytest.mark.parametrize("more", [[], ["--json"], ["--prompt", "p1"], ["--eval"]])
def test_a_step_that_no_run_reaches_is_not_there(
    path: Path, capsys: pytest.CaptureFixture[str], step: int, more: list[str]
) -> None:
    with RolloutStore(path) as store:
        sample_group(store, 0)
        train(store, 0, 0)
    assert cli.main(["report", str(path.parent), f"--step={step}", *more]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert (f"no step {step} (0 ... 0)" in line) or more == ["--eval"]


def test_several_runs_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with RolloutStore(tmp_path / name / "rollouts.sqlite") as store:
            sample_group(store, 0)
            train(store, 0, 0)
    runs = [str(tmp_path / name) for name in ("a", "b", "none")]
    assert cli.main(["report", *runs]) == 1  # of the last, which is none
    said = capsys.readouterr()
    lines = words(said.out.splitlines())
    assert [line for line in lines if line.startswith("/")] == [f"{run}:" for run in runs] and lines.count(HEAD) == 2
    assert_names(said.err, runs[-1])


@pytest.mark.parametrize(("width", "columns"), [(None, 11), (100, 11), (80, 9), (40, 4), (1, 1)])
def test_a_table_fits_the_terminal(width: int | None, columns: int) -> None:
    table = [LEARNED.split(), "3400-3599 0.1250 0.250 -0.0012 1.0e-06 1.00 0.0012 12.0 2.0 9.0 1.5".split()]
    lines = aligned(table, width)
    assert [len(line.split()) for line in lines] == [columns, columns]
    assert width in (None, 1) or len(lines[0]) <= width
