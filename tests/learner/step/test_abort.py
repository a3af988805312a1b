"""An aborted step is as if it had never begun, on all ranks and in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ..scenarios import make_batch, make_config, make_model_folder
from ..world import run_world

DISTRIBUTED = {"optimizer": {"distributed": True, "overlap_grad_reduce": True}}
LATE = 10_000
#: name -> (model, parallel sections, other sections, look at which it is requested, whether the step is aborted then).
#: The first look comes before the first pass (groups without variance), the next one before that pass's micro-batch.
CASES = {
    "tp2 before a micro-batch": ("qwen2", {"tensor": 2}, {}, 6, True),
    "cp2": ("qwen2", {"context": 2}, {}, 5, True),
    "dp2": ("qwen2", {}, {}, 5, True),
    "dp2 overlapped": ("qwen2", {}, DISTRIBUTED, 6, True),
    "dp2 deferred": ("qwen2", {}, {"algorithm": {"opob_mode": "deferred"}}, 6, True),
    "dp2 two passes": ("qwen2", {}, {"algorithm": {"opob_mode": "two_pass"}, **DISTRIBUTED}, 8, True),
    "dp2 in the pass for a statistic": ("qwen2", {}, {"algorithm": {"method": "m2po"}}, 3, True),
    "ep2": ("moe", {"expert": 2}, {}, 6, True),
    "dp2 while tokens of experts are counted": ("moe", {}, {"algorithm": {"global_aux_loss": 0.1}}, 3, True),
    "dp2 behind the count": (
        "moe",
        {},
        {"algorithm": {"global_aux_loss": 0.1, "kl_coef": 0.1, "kl_reference": "initial"}},
        8,
        True,
    ),
    "pp2 before a pass": ("qwen2", {"pipeline": 2}, {}, 2, True),
    "pp2 too late": ("qwen2", {"pipeline": 2}, {}, 3, False),  # its second pass is in flight: the step is finished
    "tp2 too late": ("qwen2", {"tensor": 2}, {}, LATE, False),
}


#: One of each kind of parallelism, and one that is too late; the other cases are slow.
DEFAULT = (
    "tp2 before a micro-batch",
    "cp2",
    "dp2 overlapped",
    "dp2 in the pass for a statistic",
    "ep2",
    "pp2 before a pass",
    "pp2 too late",
)
OTHERS = tuple(name for name in CASES if name not in DEFAULT)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_model_folder(root / family, family, layers=2) for family in ("qwen2", "moe")}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("names", [DEFAULT, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["default", "others"])
def test_an_aborted_step_changes_nothing(names: tuple[str, ...], models: dict[str, Path]) -> None:
    """Cases share a world of their own: no two steps of it may have one version."""
    cases, batches = [], [make_batch(models["qwen2"], step) for step in (0, 1)]
    for family, parallel, sections, look, _ in (CASES[name] for name in names):
        cases.append((make_config(models[family], 2, parallel=parallel, **sections), look))
    outcomes = run_world(
        2, "learner.run_layouts:leave_and_take_again", {"cases": cases, "batches": batches}, timeout_s=350, alone=True
    )
    for name, outcome in zip(names, outcomes, strict=True):
        aborts = CASES[name][-1]
        assert outcome["left"] is aborts, name
        assert (outcome["moved"] == 0.0) is aborts, name
        whole, again = outcome["whole"], outcome["again"]
        for key, parameter in whole["parameters"].items():
            assert torch.equal(parameter, again["parameters"][key]), (name, key)
        if aborts:
            timeless = {k: repr(v) for k, v in whole["metrics"].items() if not k.startswith("time/")}  # nan is nan
            assert timeless == {k: repr(again["metrics"][k]) for k in timeless}, name
