"""Which layers are built, and that TransformerEngine's places in the model are filled right: the oracle's step.

Layers, attention and rotary positions of the same signatures stand for its own.

TransformerEngine itself needs a GPU: ``tests/gpu/run.py`` compares its layers with ours.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.messages import assert_names
from vcpo_megatron.learner.megatron import layer_specs
from vcpo_megatron.learner.megatron.attention_kernels import AttentionDevice
from vcpo_megatron.models.folder import read_model

from ..scenarios import make_batch, make_config, make_model_folder, oracle_step
from ..test_layouts import assert_equals_the_oracle
from ..world import run_world

ATTENTION: dict[str, Any] = {"core_attention": "transformer_engine"}
MATRICES: dict[str, Any] = {"transformer_impl": "transformer_engine"}
SP: dict[str, Any] = {"tensor": 2, "sequence_parallel": True}
#: (family, [model], [parallel], [algorithm]) on two ranks: attention once and matrices once; the others are slow.
DEFAULT = [("qwen2", ATTENTION, SP, {}), ("qwen2", MATRICES, {}, {})]
OTHERS = [
    ("moe", ATTENTION, {"expert": 2}, {}),
    ("qwen3", ATTENTION, {"pipeline": 2, "virtual_pipeline": 2}, {"opob_mode": "deferred"}),
    ("qwen3", {**MATRICES, **ATTENTION, "recompute": "selective"}, {"pipeline": 2}, {"opob_mode": "deferred"}),
    ("windowed", {}, {"context": 2}, {}),
    ("latent", {}, {**SP, "expert": 2}, {}),
]


@pytest.mark.timeout(500)
@pytest.mark.parametrize("rows", [DEFAULT, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["default", "others"])
def test_engines_layers_take_the_step_of_the_oracle(rows: list[Any], tmp_path: Path) -> None:
    """Attention is told the boundaries of a pack; matrices get one trajectory a micro-batch, as the log says."""
    models = {family: make_model_folder(tmp_path / family, family) for family in {row[0] for row in rows}}
    cases = [
        (
            make_config(models[family], 2, model=model, parallel=parallel, algorithm=algorithm),
            [make_batch(models[family])],
        )
        for family, model, parallel, algorithm in rows
    ]
    found = run_world(2, "learner.run_layouts:with_engine_layers", {"cases": cases}, timeout_s=400, alone=True)
    told = zip(rows, cases, found["outcomes"], found["said"], found["seen"], strict=True)
    for (family, model, *_), (config, (batch,)), outcome, said, (linears, formats, turned) in told:
        assert_equals_the_oracle(outcome, oracle_step(models[family], batch, config))
        alone, fused = "transformer_impl" in model, "core_attention" in model
        assert ("packing: one trajectory a micro-batch" in said) == alone
        assert linears == ({("column", False, True), ("row", False, True)} if alone else set())
        assert formats == ({("thd", "causal", True)} if fused else set())
        assert turned == (family != "latent")  # rotary positions are its own wherever it is there


def test_a_machine_without_it_says_so_before_a_layer_is_built(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "model", layers=2)
    config = make_config(model, 1, model=ATTENTION)
    message = run_world(1, "learner.run_layouts:refusal_to_build", {"config": config}, alone=True)
    assert_names(message, "TransformerEngine cannot be imported", "no GPU", "use model")


@pytest.mark.parametrize(
    ("family", "wanted", "context", "expected"),
    [
        ("qwen2", "auto", 1, ["transformer_engine"] * 4),
        ("windowed", "auto", 1, ["transformer_engine", "flash", "flash", "flash"]),  # windows from layer 1 on
        ("windowed", "torch", 1, ["flash"] * 4),
        ("qwen2", "auto", 2, ["flash"] * 4),
        ("latent", "auto", 1, ["flash"] * 4),  # keys of 14 dimensions, values of 10
    ],
)
def test_every_layer_of_a_model_has_its_kernel(
    family: str, wanted: str, context: int, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an H100 with TransformerEngine."""
    monkeypatch.setattr(layer_specs, "attention_device", lambda: AttentionDevice((9, 0), True, True))
    shape = read_model(make_model_folder(tmp_path, family))
    config: Any = SimpleNamespace(
        params_dtype=torch.bfloat16, context_parallel_size=context, apply_rope_fusion=layer_specs.rope_is_fused(shape)
    )
    model: Any = SimpleNamespace(core_attention=wanted)
    assert [choice.kernel for choice in layer_specs.attention_choices(config, model, shape)] == expected
    said = layer_specs.describe_kernels(config, model, shape)
    assert said.startswith("attention: ") and "\n" not in said
    assert said.endswith("; rope: " + ("Megatron's" if family == "latent" else "TransformerEngine's"))
