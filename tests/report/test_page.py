"""The page of a run or several: its numbers are those of metrics.jsonl, whatever was written is only shown."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.messages import assert_names
from tests.orchestrator.store.test_store import V0, trajectory
from tests.report.test_charts import lines
from vcpo_megatron.cli import main as cli
from vcpo_megatron.observability.sinks import JsonlSink
from vcpo_megatron.orchestrator.store.records import EpisodeTimes
from vcpo_megatron.orchestrator.store.store import RolloutStore
from vcpo_megatron.report.page import MOST_BYTES, page
from vcpo_megatron.report.runs import opened, run_names
from vcpo_megatron.types import PolicyVersion, TrajectoryResult

pytestmark = pytest.mark.timeout(60)

VOID = {"meta", "input", "br"}
WRITTEN = "</pre><script>alert('x')</script>\" & \ud83d \x00 \x1b[2J \u202e"


class Page(HTMLParser):
    """What a browser sees: tags that are balanced, the numbers, the cells of tables, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.numbers: dict[str, str] = {}
        self.rows: list[list[str]] = []
        self.text = ""
        self._term = ""
        text.encode()  # no half of a pair
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        assert not {name for name, _ in attrs} & {"src", "onclick", "onload"}
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data.replace("\n", " ") if self.open and self.open[-1] in ("b", "span", "i") else f"{data}\n"
        if "dt" in self.open:
            self._term = data
        if "dd" in self.open:
            self.numbers[self._term] = data
        if {"td", "th"} & set(self.open) and "style" not in self.open:
            self.rows[-1][-1] += data

    def row(self, name: str) -> list[str]:
        return next(row[1:] for row in self.rows if row and row[0] == name)


def rows_of(steps: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows of a run that learns, with every kind of number, some of them not finite."""
    chance = random.Random(seed)
    for step in range(steps):
        row: dict[str, Any] = {"step": step, "policy_version": step + 1, "reward/mean": chance.random()}
        row |= {name: chance.random() for name in ("ess/ratio", "ess/lr_scale", "weight/mean", "entropy", "loss")}
        row |= {name: math.exp(chance.gauss(0, 1)) for name in ("weight/max", "grad_norm/total")}
        row |= {
            name: math.exp(chance.gauss(0, 1)) for name in ("grad_norm/trajectory_max", "grad_norm/trajectory_mean")
        }
        row |= {
            "kl/behavior": math.nan if step == 3 else chance.gauss(0.1, 0.1),
            "lr/effective": 1e-6 * chance.random(),
        }
        row |= {"staleness/mean": chance.random() * 4, "staleness/max": 4.0, "step/skipped": float(step == 3)}
        row |= {"tokens/trained": 512, "time/step": 1 + chance.random(), "time/wait_batch": 0.25}
        row |= {"time/forward_backward": 0.5, "time/sync_stall": 0.125, "rollouts/trained": 64 * (step + 1)}
        row |= {"rollouts/dropped": 8, "rollouts/failed": 1, "some/new_number": chance.random()}
        if step % 10 == 0:
            row |= {"eval/accuracy": min(1.0, 0.2 + step / steps), "eval/samples": 256}
        yield row


def make_run(
    folder: Path, steps: int, seed: int = 0, config: str = "[optimizer]\nlr = 1e-3\nclip_grad = 1.0\n"
) -> Path:
    folder.mkdir(parents=True)
    sink = JsonlSink(folder / "metrics.jsonl")
    for row in rows_of(steps, seed):
        sink.write(row)
    sink.close()
    (folder / "resolved.toml").write_text(config)
    return folder


def shown(*folders: Path) -> tuple[str, Page]:
    with opened(folders) as runs:
        text = page(runs)
    return text, Page(text)


def held(folder: Path, name: str) -> list[float]:
    """The finite values of a metric, by the file itself."""
    found = [json.loads(line).get(name) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [value for value in found if value is not None]


def text_of(value: float) -> str:
    return f"{value:.4g}"


def test_the_numbers_are_those_of_the_metrics(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 50)
    _, found = shown(run)
    accuracy, reward = held(run, "eval/accuracy"), held(run, "reward/mean")
    assert found.numbers["accuracy, last"] == f"{text_of(accuracy[-1])} (step 40)"
    assert found.numbers["accuracy, best"] == f"{text_of(max(accuracy))} (step 40)"
    assert found.numbers["reward, last"] == f"{text_of(reward[-1])} (step 49)"
    assert found.numbers["reward, best"] == f"{text_of(max(reward))} (step {reward.index(max(reward))})"
    for name, metric, reduce in (
        ("ESS ratio, median", "ess/ratio", statistics.median),
        ("ESS ratio, least", "ess/ratio", min),
        ("KL, largest", "kl/behavior", max),
        ("weight, largest", "weight/max", max),
        ("gradient norm, median", "grad_norm/total", statistics.median),
        ("trajectory norm, largest", "grad_norm/trajectory_max", max),
        ("staleness, mean", "staleness/mean", statistics.fmean),
        ("seconds in all", "time/step", math.fsum),
    ):
        assert found.numbers[name] == text_of(reduce(held(run, metric))), name
    assert found.numbers["tokens a second"] == text_of(50 * 512 / math.fsum(held(run, "time/step")))
    assert (found.numbers["steps"], found.numbers["trained"], found.numbers["skipped steps"]) == ("50", "3200", "1")


def chart(text: str, title: str) -> str:
    return next(svg for svg in re.findall(r"<svg.*?</svg>", text) if f">{title}<" in svg)


@pytest.mark.parametrize(
    ("title", "name", "log"),
    [("Loss (no measure of progress)", "loss", False), ("Norm of the gradient", "grad_norm/total", True)],
)
def test_a_chart_has_the_values_of_the_metrics(tmp_path: Path, title: str, name: str, log: bool) -> None:
    run = make_run(tmp_path / "run", 50, config="")
    ((piece,),) = lines(chart(shown(run)[0], title))
    values = [math.log(value) if log else value for value in held(run, name)]
    low, high = min(values), max(values)
    assert [height for _, height in piece] == pytest.approx([(v - low) / (high - low) for v in values], abs=1e-3)
    assert [at for at, _ in piece] == pytest.approx([step / 49 for step in range(50)], abs=1e-3)


def test_a_value_that_is_not_finite_breaks_its_line(tmp_path: Path) -> None:
    (pieces,) = lines(chart(shown(make_run(tmp_path / "run", 50))[0], "KL from the behaviour policy, nats"))
    assert [len(piece) for piece in pieces] == [3, 46]


def test_where_the_time_went(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 50)
    svg = chart(shown(run)[0], "Where the time went, all steps")
    parts = dict(re.findall(r"<title>(.*?): ([\d.]+) s</title>", svg))
    total = math.fsum(held(run, "time/step"))
    assert parts == {
        "wait for a batch": "12.5",
        "forward and backward": "25",
        "copy of weights": "6.25",
        "rest": text_of(total - 43.75),
    }


def test_a_number_that_is_never_finite_has_no_chart(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 20)
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(re.sub(r'("grad_norm/trajectory_\w+"): [^,]*', r"\1: null", text))
    assert "Norms of trajectories" not in shown(run)[0] and "Norm of the gradient" in shown(run)[0]


def test_numbers_that_no_chart_was_made_for_are_shown(tmp_path: Path) -> None:
    text, found = shown(make_run(tmp_path / "run", 20))
    assert chart(text, "Other: some")
    assert_names(found.text, "One value throughout", "rollouts/dropped = 8")


def test_runs_side_by_side(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "a" / "x", 30, 1, "[optimizer]\nlr = 1e-3\n"),
        make_run(tmp_path / "y", 20, 2, "[optimizer]\nlr = 2e-3\n"),
    ]
    text, found = shown(*runs)
    assert found.row("")[:2] == ["x", "y"]
    assert found.row("ESS ratio, median") == [text_of(statistics.median(held(run, "ess/ratio"))) for run in runs]
    assert found.row("optimizer.lr")[:2] == ["0.001", "0.002"]
    assert len(lines(chart(text, "Norm of the gradient"))) == 2


def test_names_of_runs() -> None:
    paths = [Path(path) for path in ("/r/a/x", "/r/b/x", "/r/y", "/r/y")]
    assert run_names(paths) == ["a/x", "b/x", "y (1)", "y (2)"]


def fall(folder: Path) -> None:
    accuracy = [0.2, 0.5, 0.8, 0.9, 0.9, 0.9, 0.9, 0.4, 0.2, 0.1]
    lines_ = [
        {"step": 10 * i + j, "kl/behavior": 0.02 if 10 * i + j < 55 else 2.0}
        | ({"eval/accuracy": value, "eval/samples": 256} if j == 0 else {})
        for i, value in enumerate(accuracy)
        for j in range(10)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines_))


def test_a_collapse_is_pointed_at(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1)
    fall(run)
    text, found = shown(run)
    assert_names(found.text, "Collapse", "eval/accuracy", "0.9", "step 60", "step 70", "0.1")
    assert_names(found.text, "First to turn", "kl/behavior", "step 55", "15 steps before")
    assert "falls, step 70" in chart(text, "Accuracy and reward")


# --- what is missing --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        '{"step": 0}\n',
        '{"step": 0, "ess/ratio": 0.5}\n{"step": 1, "ess/ra',
        "no row\n[1]\n",
        '{"step": 0, "loss": null}\n',
    ],
)
def test_a_run_of_which_little_is_known(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "resolved.toml").write_text("[train]\nsteps = 10\n")
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    text, found = shown(tmp_path)
    assert_names(found.text, "no rollout store at")
    assert "nan" not in re.sub(r"<style>.*?</style>", "", text)
    if content and "0.5" in content:
        assert found.numbers["ESS ratio, least"] == "0.5"


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert cli.main(["report", str(make_run(tmp_path / "run", 2)), str(tmp_path / "none"), "--html", str(out)]) == 1
    assert_names(capsys.readouterr().err, tmp_path / "none", "no run directory")
    assert not out.exists()


@pytest.mark.parametrize("more", ["--json", "--step=1", "--rows=3", "--text"])
def test_options_of_the_text_are_refused_for_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str
) -> None:
    assert cli.main(["report", str(tmp_path), "--html", str(tmp_path / "page.html"), more]) == 2
    assert_names(capsys.readouterr().err, "--html")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, out = [make_run(tmp_path / name, 20) for name in ("a", "b")], tmp_path / "page.html"
    assert cli.main(["report", *map(str, runs), "--html", str(out)]) == 0
    Page(out.read_text(encoding="utf-8"))
    assert_names(capsys.readouterr().out, out, "MB")


# --- what a policy wrote ----------------------------------------------------------------------


def write_store(folder: Path, prompt: str = "p", reason: str = "tool crashed") -> None:
    with RolloutStore(folder / "rollouts.sqlite") as store:
        for step in range(3):
            store.admit(step, prompt, step, 2, V0)
            for sample in (0, 1):
                store.add_trajectory(trajectory(step, sample, V0, PolicyVersion(1, step), prompt_id=prompt))
            results = [
                TrajectoryResult(step, sample, math.log(2.0) * sample, 2.0**sample, 1.5, 0.125) for sample in (0, 1)
            ]
            store.mark_trained(step, results, [step], [step])
        store.admit(9, prompt, 9, 2, V0)
        store.fail(9, 0, reason)


def test_samples_and_losses(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    write_store(run)
    text, found = shown(run)
    assert_names(found.text, "token ids are shown")
    assert ["failed: tool crashed", "1", ""] in found.rows and ["dropped: a member failed", "1", ""] in found.rows
    assert_names(found.text, "generated 8", "queued 0", "trained 6", "dropped 1", "failed 1")
    assert 'class="sample w8"' in text and 'class="sample w6"' in text  # weights 2 and 1
    assert re.search(r'<i class="v0 p\d">\d+ </i>', text) and re.search(r'<i class="v1 p\d">\d+ </i>', text)


def test_nothing_that_was_written_is_obeyed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3, config=f"[model]\npath = '/m/</td><script>'\n[x]\ny = '''{WRITTEN[:20]}'''\n")
    write_store(run, WRITTEN, WRITTEN)
    (run / "metrics.jsonl").write_text(
        json.dumps({"step": 0, WRITTEN: 1.5}) + "\n" + json.dumps({"step": 1, WRITTEN: 2}) + "\n"
    )
    text, found = shown(run)
    assert "script" not in found.tags and "<script" not in text
    assert not {"\x00", "\x1b", "\u202e"} & set(text)


def test_a_page_needs_nothing_beside_itself(tmp_path: Path) -> None:
    text, found = shown(make_run(tmp_path / "run", 30))
    assert set(re.findall(r"https?://[^\"' <]*", text)) <= {"http://www.w3.org/2000/svg"}
    assert not found.tags & {"script", "link", "img", "iframe"} and "@import" not in text and "url(" not in text


def test_the_timeline(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    write_store(run)
    assert_names(shown(run)[1].text, "No times of trajectories were recorded", "run")
    with RolloutStore(run / "rollouts.sqlite") as store:
        store.keep_times({(1, s): EpisodeTimes(100.0, 110.0, ((101.0, 104.0), (106.0, 110.0))) for s in (0, 1)})
        store.keep_step_times(1, 115.0, 120.0)
    svg = chart(shown(run)[0], "Step 1, 2 s of wait left out")
    assert re.findall(r"<title>1/0: (\w+), ([\d.]+) s</title>", svg) == [
        *[("generate", "3"), ("generate", "4"), ("tool", "1"), ("tool", "2"), ("wait", "5"), ("train", "5")]
    ]


# --- size -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("runs", "steps"), [(1, 2000), (12, 300)])
def test_a_page_of_long_runs_is_small(tmp_path: Path, runs: int, steps: int) -> None:
    folders = [make_run(tmp_path / str(number), steps, number) for number in range(runs)]
    with opened(folders) as found:
        assert len(page(found).encode()) < MOST_BYTES
