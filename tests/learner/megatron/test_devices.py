"""A rank that was given GPUs: what it must see, which names it needs, and that its numbers are those of CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.config.test_process import CONTEXT
from tests.messages import assert_names
from vcpo_megatron.config.load import dump_resolved
from vcpo_megatron.learner import __main__ as learner
from vcpo_megatron.learner.megatron.platform import DeviceError, require_devices
from vcpo_megatron.run.directory import RunDirectory

from ..scenarios import make_batch, make_config, make_model_folder
from ..world import ROOT, run_world

BROKEN_ENGINE = Path(__file__).parents[1] / "broken_engine"


def sees(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)


@pytest.mark.parametrize(("given", "seen"), [((), 0), ((), 2), (("0",), 1), (("4", "5"), 2), (("1",), 8)])
def test_devices_that_are_all_seen(given: tuple[str, ...], seen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sees(monkeypatch, seen)
    require_devices(given)


@pytest.mark.parametrize(("given", "seen"), [(("0",), 0), (("0", "9"), 1)])
def test_devices_that_are_not_seen_are_named(
    given: tuple[str, ...], seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPUs would be used in silence, or two ranks would share a GPU."""
    sees(monkeypatch, seen)
    match = (
        rf"given GPUs {','.join(given)} \(CUDA_VISIBLE_DEVICES\) and sees {seen} of {len(given)} \(torch .*nvidia-smi"
    )
    with pytest.raises(DeviceError, match=match):
        require_devices(given)


def test_what_the_driver_says_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sees(monkeypatch, 0)

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 11040)")

    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(DeviceError, match=r"too old \(found version 11040\)\)"):
        require_devices(["0"])


def test_a_rank_without_its_devices_ends_before_it_builds_anything(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sees(monkeypatch, 0)
    directory = RunDirectory(tmp_path)
    directory.resolved.write_text(dump_resolved(make_config(model_folder, 1)))
    for name, value in {**CONTEXT.environment(), "VCPO_RUN_DIR": str(tmp_path), "RANK": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    assert learner._run() == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert_names(last, "vcpo: error: learner rank 1: DeviceError", "GPUs 0,1", "CUDA_VISIBLE_DEVICES")


@pytest.mark.timeout(300)
def test_every_kind_of_layer_takes_the_path_for_gpus_without_transformer_engine(tmp_path: Path) -> None:
    """A step of a dense model, of one with experts and of one with latent attention, where a GPU is claimed: Megatron
    leaves names of TransformerEngine undefined that the last two need."""
    cases = []
    for family in ("qwen2", "moe", "latent"):
        model = make_model_folder(tmp_path / family, family, layers=2)
        cases.append((make_config(model, 1), [make_batch(model)]))
    plain = run_world(1, "learner.run_layouts:one_step_each", {"cases": cases})
    claimed = run_world(1, "learner.claimed_gpu:one_step_each", {"cases": cases}, fresh=True)
    for one, other in zip(plain, claimed, strict=True):
        assert other["results"][0].metrics["loss"] == pytest.approx(one["results"][0].metrics["loss"], rel=1e-5)
        scale = max(float(gradient.abs().max()) for gradient in one["gradients"].values())
        assert one["gradients"].keys() == other["gradients"].keys()
        for name, expected in one["gradients"].items():
            assert float((other["gradients"][name] - expected).abs().max()) <= 1e-5 * scale, name


def test_a_transformer_engine_that_cannot_be_imported_is_one_line(tmp_path: Path) -> None:
    """Megatron would end in the middle of its own import, or go without."""
    program = (
        "from learner import claimed_gpu\n"
        "claimed_gpu.claim()\n"
        "from vcpo_megatron.learner.megatron import platform\n"
        "try:\n"
        "    platform.prepare()\n"
        "except platform.LibraryError as error:\n"
        "    print(error)\n"
    )
    path = os.pathsep.join(map(str, (BROKEN_ENGINE, ROOT, ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, env=environment)
    (line,) = done.stdout.splitlines()
    names = ("OSError: transformer_engine_torch.so", "tools/make_gpu_env.sh", "pip uninstall transformer-engine")
    assert_names(line, *names)
