"""Every family in every layout computes transformers' logits and gives its weights back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.slow import Made, matrix
from vcpo_megatron.learner.checkpoint.convert import CheckpointLayout, import_hf

from .families import FAMILIES, make_family, reference_logits
from .scenarios import make_config
from .world import run_world

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "single": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "tp2 pp2": (4, {"tensor": 2, "pipeline": 2}),
    "ep2": (2, {"expert": 2}),
    "tp2 ep2": (2, {"tensor": 2, "expert": 2}),
    "tp2 etp2": (2, {"tensor": 2, "expert_tensor": 2}),
    "pp2 ep2": (4, {"pipeline": 2, "expert": 2}),
    "tp2 pp2 ep2": (4, {"tensor": 2, "pipeline": 2, "expert": 2}),
}


def has_experts(family: str) -> bool:
    return "moe" in family or "mixtral" in family


#: Every family runs in the layouts of one and two ranks, these in those of four.
IN_FOUR_RANKS = ("qwen2-tied-yarn", "qwen3", "mixtral", "qwen2-moe-mixed")
#: Layouts that read a checkpoint, which was imported for another layout, in place of the Hugging Face folder.
FROM_CHECKPOINT = ("tp2", "pp2 ep2", "tp2 pp2", "tp2 pp2 ep2")
CASES = [
    (layout, family)
    for layout, (_, parallel) in LAYOUTS.items()
    for family in FAMILIES
    if has_experts(family) or not {"expert", "expert_tensor"} & parallel.keys()
    if LAYOUTS[layout][0] < 4 or family in IN_FOUR_RANKS
]


#: Every family on one rank, and every layout of two with the families that differ most in it; the others are slow.
DEFAULT = (
    *[("single", family) for family in FAMILIES],
    ("tp2", "qwen2-tied-yarn"),
    ("tp2", "qwen3-moe"),
    ("tp2", "deepseek-moe"),
    ("pp2", "qwen2-tied-yarn"),
    ("pp2", "mixtral"),
    ("ep2", "qwen2-moe-mixed"),
    ("ep2", "deepseek-moe-yarn"),
    ("tp2 etp2", "qwen3-moe"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return Made(lambda family: make_family(family, root / family))


@pytest.fixture(scope="module")
def checkpoints(folders: dict[str, Path]) -> dict[str, Path]:
    """Dense models for two stages; models with experts for two tensor-parallel and two expert-parallel ranks."""

    def make(family: str) -> Path:
        layout = CheckpointLayout(tensor=2, expert=2) if has_experts(family) else CheckpointLayout(pipeline=2)
        found = folders[family].with_name(f"{family}.checkpoint")
        assert import_hf(folders[family], found, layout, vocab_multiple=8, progress=False) == {}
        return found

    return Made(make)


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, list[torch.Tensor]]:
    return Made(lambda family: reference_logits(folders[family]))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("layout", "family"), matrix(CASES, DEFAULT))
def test_logits_and_weights(
    layout: str,
    family: str,
    folders: dict[str, Path],
    checkpoints: dict[str, Path],
    references: dict[str, list[torch.Tensor]],
) -> None:
    ranks, parallel = LAYOUTS[layout]
    source = str(checkpoints[family]) if layout in FROM_CHECKPOINT else None
    cases = [(make_config(folders[family], ranks, parallel=parallel), source)]
    (outcome,) = run_world(ranks, "learner.run_families:logits_each", {"cases": cases})
    for found, expected in zip(outcome["logits"], references[family], strict=True):
        assert expected.abs().max() > 1  # the comparison has something to compare
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    original = load_file(folders[family] / "model.safetensors")
    assert outcome["weights"].keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(outcome["weights"][name], tensor), name
