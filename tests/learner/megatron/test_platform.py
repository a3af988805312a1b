"""Fused kernels: what is chosen of what is installed, and that results do not depend on it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.messages import assert_names
from vcpo_megatron.config.fused_kernels import InstalledKernels, find_kernels
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
