"""A run that starts from another's checkpoint has its weights, in any layout, and takes the step that a run from the
exported weights takes; a resume with another rate, decay or length trains by them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.messages import assert_names, assert_said
from tests.slow import matrix
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.run.directory import RunDirectory

from ..scenarios import make_batch, make_config, make_model_folder
from ..world import run_world

CONSTANT = {"optimizer": {"lr": 1e-2, "min_lr": 0.0, "clip_grad": 0.5, "eps": 1e-3}}


@dataclass(frozen=True)
class Layout:
    ranks: int
    parallel: dict[str, Any] = field(default_factory=dict)

    def config(self, model: Path, /, **sections: dict[str, Any]) -> RunConfig:
        return make_config(model, self.ranks, parallel=self.parallel, **sections)


ONE, TP2, PP2, DP2 = Layout(1), Layout(2, {"tensor": 2}), Layout(2, {"pipeline": 2}), Layout(2)
EP2 = Layout(2, {"expert": 2})
DISTRIBUTED = {"optimizer": {**CONSTANT["optimizer"], "distributed": True}}
BF16 = {"model": {"dtype": "bfloat16", "vocab_multiple": 8}}
#: Name -> (family, how it is saved, layouts that start from it, sections of all of them).
STARTS: dict[str, tuple[str, Layout, list[Layout], dict[str, Any]]] = {
    "alone": ("qwen2", ONE, [ONE], CONSTANT),
    "tp2": ("qwen2", TP2, [TP2, PP2], CONSTANT),
    "split": ("qwen2", ONE, [TP2], CONSTANT),
    "distributed": ("qwen2", DP2, [DP2, ONE, TP2], DISTRIBUTED),
    "bf16": ("qwen2", TP2, [TP2, ONE], {**CONSTANT, **BF16}),
    "bf16 distributed": ("qwen2", DP2, [DP2, TP2], {**DISTRIBUTED, **BF16}),
    "moe": ("moe", EP2, [EP2, ONE], CONSTANT),
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", matrix(STARTS, ("alone",)))
def test_a_run_starts_from_the_weights_of_another(name: str, tmp_path: Path) -> None:
    family, saved_by, layouts, sections = STARTS[name]
    model, folder = make_model_folder(tmp_path / "model", family, layers=2), str(tmp_path / "source")
    batches = [make_batch(model, n) for n in (0, 1)]
    saved = world(saved_by, "save", config=saved_by.config(model, **sections), batches=batches, folder=folder)
    directory = RunDirectory(Path(folder))
    for layout in layouts:
        configs = [
            layout.config(model, **sections, train={"start_from": directory.checkpoint(1)}),
            layout.config(model, **sections, train={"start_from": directory.checkpoint(1), "start_optimizer": True}),
            layout.config(directory.export(1), **sections),
        ]
        alone, whole, oracle = world(layout, "start_each", configs=configs, batch=batches[1], folder=folder)
        assert_equal(alone["begun"], saved["saved"])
        assert_equal(alone["parameters"], oracle["parameters"])
        assert_said("lines of a run", "start from weights", alone["said"], checkpoint=directory.checkpoint(1))
        if ("expert" in layout.parallel) != ("expert" in saved_by.parallel):
            assert_names(whole["refused"], "parallel.expert > 1", "True in the checkpoint", "False now")
            continue
        assert_equal(whole["begun"], saved["saved"])
        assert alone["steps"] == whole["steps"] == 1  # the schedule is the new run's
        rounding = 0.0 if layout == saved_by else 1e-3 if "model" not in sections else 2e-2
        assert_equal(whole["parameters"], saved["next"]["parameters"], rounding)
        assert not equal(alone["parameters"], whole["parameters"])


def world(layout: Layout, function: str, **arguments: Any) -> Any:
    return run_world(layout.ranks, f"learner.run_starts:{function}", arguments, timeout_s=250)


def equal(found: dict[str, Any], expected: dict[str, Any], within: float = 0.0) -> bool:
    assert found.keys() == expected.keys() and found
    return all(float((found[name] - expected[name]).abs().max()) <= within for name in found)


def assert_equal(found: dict[str, Any], expected: dict[str, Any], within: float = 0.0) -> None:
    assert equal(found, expected, within)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunDirectory, dict[str, Any], Any]:
    """A run of one rank: lr 1e-2, a cosine of 10 steps, decay 0.1."""
    root = tmp_path_factory.mktemp("source")
    model = make_model_folder(root / "model", layers=2)
    batches = [make_batch(model, n) for n in (0, 1)]
    config = ONE.config(model, optimizer={"schedule": "cosine", "schedule_steps": 10})
    saved = world(ONE, "save", config=config, batches=batches, folder=str(root / "run"))
    return model, RunDirectory(root / "run"), saved, batches[1]


def cosine(step: int, lr: float, length: int, least: float = 0.0) -> float:
    """The rate of ``step``, counted from 1, of a schedule that reaches ``least`` in the step after its last."""
    return least + (lr - least) * 0.5 * (1 + math.cos(math.pi * step / (length + 1)))


def test_a_resume_trains_by_its_own_settings(source: tuple[Path, RunDirectory, dict[str, Any], Any]) -> None:
    model, directory, saved, batch = source
    rows = [
        ({"schedule_steps": 10}, cosine(2, 1e-2, 10)),
        ({"schedule_steps": 10, "lr": 1e-3}, cosine(2, 1e-3, 10)),
        ({"schedule_steps": 10, "min_lr": 5e-3}, cosine(2, 1e-2, 10, 5e-3)),
        ({"schedule_steps": 1}, 0.0),
        ({"schedule_steps": 40}, cosine(2, 1e-2, 40)),
        ({"schedule_steps": 10, "weight_decay": 0.0}, cosine(2, 1e-2, 10)),
        ({"schedule_steps": 10, "clip_grad": 1e-3}, cosine(2, 1e-2, 10)),
    ]
    configs = [
        ONE.config(model, optimizer={"schedule": "cosine", **optimizer}, train={"steps": 1000}) for optimizer, _ in rows
    ]
    found = world(ONE, "resume_each", configs=configs, batch=batch, folder=str(directory.path))
    for (optimizer, rate), outcome in zip(rows, found, strict=True):
        scale = outcome["metrics"]["ess/lr_scale"]
        assert outcome["metrics"]["lr/effective"] == pytest.approx(rate * scale, rel=1e-9), optimizer
        assert outcome["decays"] == {0.0, optimizer.get("weight_decay", 0.1)}  # norms and biases have none
        before = f"before this resume {cosine(2, 1e-2, 10):g}"
        assert_names(outcome["said"], "vcpo: note", f"step 1: {rate:g}, {before}")
    assert equal(found[0]["parameters"], saved["next"]["parameters"])  # nothing has changed: bit for bit
    for changed in found[1:]:
        assert not equal(changed["parameters"], found[0]["parameters"])


def test_what_does_not_fit_is_refused(source: tuple[Path, RunDirectory, dict[str, Any], Any], tmp_path: Path) -> None:
    model, directory, _, batch = source
    other = make_model_folder(tmp_path / "other", layers=1)
    start = {"start_from": directory.checkpoint(1)}
    both = {**start, "start_optimizer": True}
    configs = [
        ONE.config(other, train=start),
        ONE.config(model, train=start, model={"vocab_multiple": 64}),
        ONE.config(model, train=both, optimizer={"distributed": True}),
        ONE.config(model, train=start, optimizer={"distributed": True}),
    ]
    *refused, sound = world(ONE, "start_each", configs=configs, batch=batch, folder=str(tmp_path))
    shape, padded, form = (outcome["refused"] for outcome in refused)
    begin = f"train.start_from = {directory.checkpoint(1)}: "
    assert_names(shape, f"{begin}its model", f"{other}: num_layers 2", "1 now")
    assert_names(padded, f"{begin}its model", model, "(model.vocab_multiple) 32")
    assert_names(form, f"{begin}its optimizer", "optimizer.distributed false")
    assert "refused" not in sound


def test_the_reference_stays_the_model_and_not_what_the_run_starts_from(
    source: tuple[Path, RunDirectory, dict[str, Any], Any], tmp_path: Path
) -> None:
    model, directory, _, batch = source
    kl = {"kl_reference": "initial", "kl_coef": 0.01}
    configs = [
        ONE.config(model, algorithm=kl, train={"start_from": directory.checkpoint(1)}),
        ONE.config(model, algorithm=kl),
    ]
    moved, unmoved = world(ONE, "start_each", configs=configs, batch=batch, folder=str(tmp_path))
    assert moved["metrics"]["kl/reference"] > 1e-6
    assert unmoved["metrics"]["kl/reference"] == pytest.approx(0.0, abs=1e-9)
