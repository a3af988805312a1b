"""Fused kernels: what is chosen of what is installed, and that results do not depend on it. What passes between device
and host, and who is told."""

from __future__ import annotations

import os
import subprocess
import sys
from inspect import currentframe
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.messages import assert_names
from vcpo_megatron.config.fused_kernels import InstalledKernels, find_kernels
from vcpo_megatron.learner.megatron import platform, schedule
from vcpo_megatron.learner.megatron.platform import choose_kernels

from ..scenarios import make_batch, make_config, make_model_folder
from ..world import run_world

STAND_INS = Path(__file__).parents[1] / "stand_ins"
NVIDIA = InstalledKernels(transformer_engine=True, apex="usable", weight_gradients=True)


def package(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, InstalledKernels()),
        ({"apex/__init__.py": "raise SystemExit('imported')"}, InstalledKernels(apex="another package")),
        ({"apex/__init__.py": "", "apex/optimizers/fused_adam.py": ""}, InstalledKernels(apex="without extensions")),
        (
            {"apex/__init__.py": "", "apex/optimizers/fused_adam.py": "", "amp_C.py": ""},
            InstalledKernels(apex="usable"),
        ),
        ({"transformer_engine/__init__.py": ""}, InstalledKernels()),  # without its part for PyTorch
        (
            {
                "transformer_engine/__init__.py": "",
                "transformer_engine/pytorch/optimizers/__init__.py": "",
                "fused_weight_gradient_mlp_cuda.py": "",
            },
            InstalledKernels(True, "none", True),
        ),
    ],
)
def test_what_is_installed_is_found_without_an_import(
    files: dict[str, str], expected: InstalledKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, files)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert find_kernels() == expected
    assert not {"apex", "amp_C", "transformer_engine"} & set(sys.modules)


def test_choice_on_a_gpu() -> None:
    both = choose_kernels(NVIDIA, can_run=True)
    assert (both.adam, both.adds_products, both.hidden) == ("TransformerEngine", True, ())
    assert both.notes == ("Adam: TransformerEngine's, fused", "weight gradients: added by Apex's kernel")
    apex = choose_kernels(InstalledKernels(apex="usable"), can_run=True)
    assert (apex.adam, apex.adds_products) == ("Apex", False)
    none = choose_kernels(InstalledKernels(), can_run=True)
    assert none.adam == "torch" and none.notes == ("Adam: torch's; TransformerEngine and Apex are missing",)
    other = choose_kernels(InstalledKernels(apex="another package"), can_run=True)
    assert other.adam == "torch" and other.hidden == ("apex",)
    assert_names(other.notes[0], "apex is not NVIDIA's")


def test_without_a_gpu_they_are_named_and_hidden_from_megatron() -> None:
    chosen = choose_kernels(NVIDIA, can_run=False)
    assert (chosen.adam, chosen.adds_products) == ("torch", False)
    assert chosen.hidden == ("transformer_engine", "apex", "fused_weight_gradient_mlp_cuda")
    for note, name in zip(chosen.notes, chosen.hidden, strict=True):
        assert_names(note, name, "needs a GPU", "not used")
    assert choose_kernels(InstalledKernels(), can_run=False).notes == ()


# --- between device and host ---------------------------------------------------------------------


def line(later: int) -> str:
    """The line of this file so many lines behind the one that calls."""
    frame = currentframe()
    assert frame is not None and frame.f_back is not None
    return f"megatron/test_platform.py:{frame.f_back.f_lineno + later}"


def test_reads_are_counted_by_the_line_that_asks() -> None:
    tensor = torch.arange(3.0)
    platform.read(tensor)  # nobody watches
    with platform.watched_reads(platform.DeviceReads()) as reads:
        first = line(2)
        for _ in range(3):
            assert platform.read(tensor).tolist() == [0, 1, 2]
        with platform.watched_reads(platform.DeviceReads()) as inner:
            second = line(1)
            platform.start_read(tensor), platform.start_read(tensor, awaited=True)
    platform.start_read(tensor)
    assert dict(reads.blocking) == {first: 3} and dict(inner.blocking) == {}
    for one in (reads, inner):
        assert dict(one.asynchronous) == dict(one.awaited) == {second: 1} and not one.in_schedule


def test_reads_inside_a_schedule_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward_backward(**arguments: Any) -> None:
        nonlocal asked
        asked = line(1)
        platform.read(torch.zeros(1))

    asked = ""
    monkeypatch.setattr(schedule, "get_forward_backward_func", lambda: forward_backward)
    monkeypatch.setattr(schedule, "_messages", lambda chunks, lengths: {})
    with platform.watched_reads(platform.DeviceReads()) as reads:
        schedule.run_schedule([torch.nn.Identity()], [0], forward_backward, lengths=[1], forward_only=True)
        assert dict(reads.blocking) == dict(reads.in_schedule) == {asked: 1}
        outside = line(1)
        platform.read(torch.zeros(1))
    assert dict(reads.blocking) == {asked: 1, outside: 1} and dict(reads.in_schedule) == {asked: 1}


def test_a_copy_is_of_what_was_there_when_it_started() -> None:
    tensor = torch.ones(2)
    copy = platform.start_read(tensor)
    tensor.zero_()
    assert copy.wait().tolist() == copy.wait().tolist() == [1, 1]


def test_without_storage_the_host_reads_ones() -> None:
    with platform.without_storage() as device:
        assert platform.device() == device == torch.device("meta")
        numbers = torch.zeros(2, dtype=torch.int64, device=device)
        for found in (platform.read(numbers), platform.start_read(numbers).wait()):
            assert found.device.type == "cpu" and found.dtype is torch.int64 and found.tolist() == [1, 1]
    assert platform.device() == torch.device("cpu")


class OnGpu:
    """A tensor of a GPU, as far as a copy to the host looks at it."""

    is_meta, is_cuda, shape, dtype = False, True, (2,), torch.float64

    def detach(self) -> OnGpu:
        return self


def test_a_copy_of_a_gpu_waits_for_its_own_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into pinned memory, without a wait; its event is recorded behind it, and nothing else is ever waited for."""
    said: list[Any] = []

    class Pinned:
        def __init__(self, shape: Any, dtype: Any, pin_memory: bool) -> None:
            said.append(("pinned", shape, dtype, pin_memory))

        def copy_(self, tensor: Any, non_blocking: bool) -> None:
            said.append(("copy", non_blocking))

    class Event:
        def record(self) -> None:
            said.append("record")

        def synchronize(self) -> None:
            said.append("wait")

    monkeypatch.setattr(torch, "empty", Pinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    tensor: Any = OnGpu()
    copy = platform.start_read(tensor)
    assert said == [("pinned", (2,), torch.float64, True), ("copy", True), "record"]
    assert isinstance(copy.wait(), Pinned) and said[3:] == ["wait"]


# --- repeatable runs -------------------------------------------------------------------------------


#: In a process of its own, since it changes torch for good: a GPU is claimed, and no call reaches one.
EXACT = """
import os, torch
from vcpo_megatron.learner.megatron import platform
assert not torch.are_deterministic_algorithms_enabled()
platform.repeat_to_the_last_bit()
assert not torch.are_deterministic_algorithms_enabled()  # CPUs repeat anyway
platform.has_gpu = lambda: True
platform.repeat_to_the_last_bit()
print(torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
print(torch.utils.deterministic.fill_uninitialized_memory)
print(*(os.environ[name] for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")))
try:  # an operation without such a form is refused by its name
    torch._C._set_deterministic_algorithms(True)
    torch.empty(3).put_(torch.tensor([0]), torch.ones(1), accumulate=False)
except RuntimeError as error:
    print(error)
"""


def test_exact_lag_makes_a_gpu_deterministic() -> None:
    environment = {key: value for key, value in os.environ.items() if key not in platform._REPEATABLE}
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    command = [sys.executable, "-c", EXACT]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    deterministic, filled, variables, *refused = ran.stdout.splitlines()
    assert (deterministic, filled, variables) == ("True False", "False", ":16:8 ^NVLS 0"), ran.stderr
    assert refused and "put_" in refused[0] and "deterministic" in refused[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [("CUBLAS_WORKSPACE_CONFIG", ":0:0"), ("NCCL_ALGO", "NVLS"), ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")],
)
def test_an_environment_that_rules_it_out_is_refused_by_name(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "has_gpu", lambda: True)
    for other, values in platform._REPEATABLE.items():
        monkeypatch.setenv(other, values[0])
    monkeypatch.setenv(name, value)
    with pytest.raises(platform.NotRepeatable, match=f"{name}={value} does not repeat"):
        platform.repeat_to_the_last_bit()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_results_do_not_depend_on_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps with stand-ins for Apex's Adam and its weight gradients equal those of a rank that may not use them.

    Without a GPU a rank takes torch's Adam though Apex is installed: Megatron alone would take Apex's and fail.
    """
    model = make_model_folder(tmp_path / "model", layers=2, tied=True)
    batches = [make_batch(model, 0), make_batch(model, 1)]
    low = {"model": {"dtype": "bfloat16"}}
    configs = [
        make_config(model, 1, algorithm={"method": "grpo"}),
        make_config(model, 1, algorithm={"opob_mode": "two_pass", "entropy_coef": 0.1}),
        make_config(model, 1, optimizer={"distributed": True}),
        make_config(model, 1, **low),
        make_config(model, 1, algorithm={"opob_mode": "deferred"}, **low),
    ]
    cases = [(config, batches) for config in configs]
    monkeypatch.setenv("PYTHONPATH", str(STAND_INS))
    plain, adam, imported = run_world(1, "learner.run_layouts:optimizer_in_use", {"cases": cases}, fresh=True)
    assert adam == "torch.optim.adamw" and not imported
    fused, steps, products = run_world(1, "learner.run_layouts:with_kernels", {"cases": cases}, fresh=True)
    assert len(steps) == 2 * len(configs) and all(steps)
    # plain backwards by Megatron, separated ones in bfloat16 by us; an fp32 product needs no kernel to be added to fp32
    assert [count > 0 for count in products] == [True, True, False, True, True]
    for config, one, other in zip(configs, plain, fused, strict=True):
        # of the second step: Adam's first one magnifies what rounding leaves, and parameters of 8 bits may fall apart
        tolerance = 2e-5 if config.model.dtype == "float32" else 2e-2
        for key, expected in one["gradients"].items():
            scale = max(float(g.abs().max()) for g in one["gradients"].values())
            assert float((other["gradients"][key] - expected).abs().max()) <= tolerance * scale, key
        for key, expected in one["parameters"].items():
            difference = (other["parameters"][key].float() - expected.float()).abs()
            assert float(difference.mean()) < (1e-6 if config.model.dtype == "float32" else 1e-3), key
