"""A new run from the weights of another, through the whole product: its servers hold them before any request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.messages import assert_names
from vcpo_megatron.environments.modular_sum import draw_heldout, write_prompts

from .running import Run, read_rows

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]
#: Exact lag: an evaluation then depends on the weights alone, to the last answer.
EXACT = (
    "staleness.lag=exact",
    "staleness.max_staleness=1",
    "train.eval_every=6",
    "checkpoint.every=6",
    "train.steps=6",
)
BOUNDED = ("train.steps=6", "train.eval_every=0", "checkpoint.every=6")
ONE = ("launch.learner_ranks=1", "parallel.tensor=1")


def history(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]


def test_a_run_goes_on_from_the_weights_of_another_and_is_resumed_with_another_rate(tmp_path: Path) -> None:
    """Saved by two tensor-parallel ranks, read by two and by one."""
    write_prompts(tmp_path / "heldout.jsonl", draw_heldout(0, 8)[:64])
    small = (f"environment.heldout={tmp_path / 'heldout.jsonl'}", "train.groups_per_step=2")
    with Run(tmp_path / "source", *EXACT, *small, "optimizer.lr=0.01") as run:
        assert run.wait(300) == 0, run.text()
    source = read_rows(tmp_path / "source")
    assert source[0]["eval/version"] == 0 and source[-1]["eval/version"] == 6
    reached = source[-1]["eval/accuracy"]
    assert reached != source[0]["eval/accuracy"]
    for name, settings in {"tp2": EXACT, "one": (*BOUNDED, *ONE)}.items():
        with Run(tmp_path / name, *settings, *small, f"train.start_from={tmp_path / 'source'}") as run:
            assert run.wait(300) == 0, run.text()
        rows = read_rows(tmp_path / name)
        assert [row["policy_version"] for row in rows] == list(range(1, 7))
        assert abs(rows[0]["kl/behavior"]) < 1e-5  # learner and servers hold the same weights
        if settings is EXACT:
            assert rows[0]["eval/version"] == 0 and rows[0]["eval/accuracy"] == pytest.approx(reached, abs=1 / 64)
        assert f"starts from the weights of {tmp_path / 'source'}/checkpoints/step_6 (6 steps)" in run.text()
        kept = history(tmp_path / name)[0]["values"]["train.start_from"]
        assert kept == json.dumps(str(tmp_path / "source" / "checkpoints" / "step_6"))
    (tmp_path / "source").rename(tmp_path / "gone")  # nobody needs it any more
    with Run(tmp_path / "one", "train.steps=8", "optimizer.lr=0.002", resume=True) as run:
        assert run.wait(300) == 0, run.text()
    assert "the resume changes optimizer.lr: 0.001 -> 0.002" in run.text()
    assert "later steps are taken at optimizer.min_lr = 0" in run.text()  # the schedule has kept its length
    assert_names(run.text(), "learning rate of step 6: 0", "before this resume 0")
    assert [line["key"] for line in history(tmp_path / "one") if line["event"] == "change"] == [
        "optimizer.lr",
        "train.steps",
    ]


def test_a_copy_that_was_edited_is_refused(tmp_path: Path) -> None:
    with Run(tmp_path / "run", "train.steps=4", "checkpoint.every=2", "train.eval_every=0", *ONE) as run:
        assert run.wait(300) == 0, run.text()
    resolved = tmp_path / "run" / "resolved.toml"
    text = resolved.read_text()
    for before, after in {'method = "vcpo"': 'method = "grpo"', "lr = 0.001": "lr = 0.01"}.items():
        assert text.count(before) == 1
        resolved.write_text(text.replace(before, after))
        with Run(tmp_path / "run", "train.steps=6", resume=True) as run:
            assert run.wait(120) == 2, run.text()
        assert f"{after} in {resolved}, which was edited" in run.text()
    resolved.write_text(text)
    with Run(tmp_path / "run", "train.steps=6", resume=True) as run:
        assert run.wait(300) == 0, run.text()
    assert len(read_rows(tmp_path / "run")) == 6
