"""Which layers are built, and that TransformerEngine's places in the model are filled right: the oracle's step.

TransformerEngine itself needs a GPU: ``tests/gpu/run.py`` compares its layers with ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.messages import assert_names

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
    for (family, model, *_), (config, (batch,)), outcome, said, (linears, formats) in told:
        assert_equals_the_oracle(outcome, oracle_step(models[family], batch, config))
        alone, fused = "transformer_impl" in model, "core_attention" in model
        assert ("packing: one trajectory a micro-batch" in said) == alone
        assert linears == ({("column", False, True), ("row", False, True)} if alone else set())
        assert formats == ({("thd", "causal", True)} if fused else set())


def test_a_machine_without_it_says_so_before_a_layer_is_built(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "model", layers=2)
    config = make_config(model, 1, model=ATTENTION)
    message = run_world(1, "learner.run_layouts:refusal_to_build", {"config": config}, alone=True)
    assert_names(message, "TransformerEngine cannot be imported", "no GPU", "use model")
