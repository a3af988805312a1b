"""Steps on tensors without storage: what the host asks of the device, by file and line, and when.

A read that waits ends the host's lead over a GPU; inside a schedule there is none, whatever the model's and the batch's
sizes are. A mixture of experts awaits one copy a forward, and none where it is computed once more: Megatron's experts
take their rows by counts that the host knows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Qwen2Config, Qwen3MoeConfig

from tests.slow import matrix
from vcpo_megatron.types import Batch, Group, PolicyVersion, Trajectory, Turn, VersionSpan

from .scenarios import make_config
from .world import run_world

VOCABULARY = 64
#: A safetensors file without tensors: weights are not read.
NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
GROUPS, GROUP_SIZE = 3, 4
MODES = ("accumulate", "deferred", "two_pass", "proxy")


def model(folder: Path, layers: int, experts: int = 0, **sizes: int) -> Path:
    """A folder with the config.json of a model, dense or with ``experts``, and no weights."""
    folder.mkdir(parents=True)
    common = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    common |= {"num_key_value_heads": 2, "num_hidden_layers": layers, "tie_word_embeddings": False, "dtype": "float32"}
    common |= sizes
    if experts:
        mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
        Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], **common, **mixture).save_pretrained(folder)
    else:
        Qwen2Config(architectures=["Qwen2ForCausalLM"], **common).save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    return folder


def batch(longest: int = 24, vocabulary: int = VOCABULARY, groups: int = GROUPS) -> Batch:
    """Rewards differ in every group but the last."""
    draw, made = np.random.default_rng(0), []
    for g in range(groups):
        members = []
        for s in range(GROUP_SIZE):
            length, prompt = int(draw.integers(longest // 2, longest)), longest // 6
            mask = np.arange(length) >= prompt
            turn = Turn(prompt, length, "stop", (VersionSpan(prompt, length, PolicyVersion(1, 0)),))
            behavior = np.where(mask, -1.0, 0.0).astype(np.float32)
            tokens = draw.integers(0, vocabulary, length).astype(np.int32)
            reward = float(s % 2) if g < groups - 1 else 1.0
            members.append(Trajectory(g, s, f"p{g}", prompt, tokens, mask, behavior, (turn,), reward))
        made.append(Group(g, f"p{g}", tuple(members)))
    return Batch(0, tuple(made))


def rehearsed(cases: list[tuple[Any, Batch, int, int]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run_world(
        1, "learner.run_rehearsals:rehearse_each", {"cases": cases}, alone=True, timeout_s=500
    )
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", matrix(MODES, ("accumulate",)))
def test_nothing_waits_inside_a_schedule(mode: str, tmp_path: Path) -> None:
    """Layers double, and then packs are more."""
    few, many = (model(tmp_path / str(layers), layers) for layers in (2, 4))
    #: (a pack a group, a pack a trajectory), packs of the two
    sizes = ((1000, GROUPS), (1, GROUPS * GROUP_SIZE))
    cases, expected = [], []
    for folder, (tokens, packs) in ((few, sizes[0]), (many, sizes[0]), (few, sizes[1])):
        algorithm, train = {"opob_mode": mode}, {"max_pack_tokens": tokens}
        cases.append((make_config(folder, 1, algorithm=algorithm, train=train), batch(), 0, 1))
        # norms in one pass and the gradient in another: the trained packs go through the model twice
        again = mode == "two_pass" or (mode == "proxy" and packs > GROUPS)
        passes = packs + (packs * (GROUPS - 1) // GROUPS if again else 0)
        # norms go to the host by themselves but for those that are estimated in the forward
        expected.append(passes + (GROUPS - 1 if mode != "proxy" else 0))
    found = rehearsed(cases)
    for one, copies in zip(found, expected, strict=True):
        assert one["in schedule"] == {} and one["unplanned"] == {} and one["awaited"] == {}
        assert one["blocking"] == found[0]["blocking"] and sum(one["blocking"].values()) == 2
        assert sum(one["asynchronous"].values()) == copies
        assert all(line.startswith("batch/packing.py") for line in one["waiting"])  # the plan, before any pass


@pytest.mark.timeout(600)
def test_a_mixture_awaits_one_copy_a_layer_and_forward_whatever_its_experts(tmp_path: Path) -> None:
    """Layers double, experts, and packs, a group's and a trajectory's; then layers are computed twice."""
    sizes = [(2, 4, "none", GROUPS), (4, 4, "none", GROUPS), (2, 8, "none", GROUPS), (4, 4, "full", GROUPS)]
    sizes.append((2, 4, "none", GROUPS * GROUP_SIZE))
    cases = []
    for number, (layers, experts, recompute, packs) in enumerate(sizes):
        folder = model(tmp_path / str(number), layers, experts)
        train = {"max_pack_tokens": 1000 if packs == GROUPS else 1}
        chosen = {"model": {"recompute": recompute}, "algorithm": {"opob_mode": "accumulate"}, "train": train}
        cases.append((make_config(folder, 1, **chosen), batch(), 0, 1))
    for one, (layers, _, _, packs) in zip(rehearsed(cases), sizes, strict=True):
        assert one["unplanned"] == {} and one["in schedule"] == {}
        (line,) = one["awaited"]
        assert line.startswith("megatron/dispatch.py") and one["awaited"][line] == layers * packs
        assert sum(one["asynchronous"].values()) == packs + GROUPS - 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rank", [0, 31])
def test_a_rank_of_a_model_of_72_billion_parameters(rank: int, tmp_path: Path) -> None:
    """TP 8 x PP 4 with sequence parallelism and full recompute: the first stage and the last."""
    sizes = {"hidden_size": 8192, "intermediate_size": 29568, "num_attention_heads": 64, "num_key_value_heads": 8}
    folder = model(tmp_path / "72B", 80, **sizes, vocab_size=152064)
    config = make_config(
        folder,
        32,
        model={"dtype": "bfloat16", "recompute": "full", "vocab_multiple": 128},
        parallel={"tensor": 8, "pipeline": 4, "sequence_parallel": True},
        train={"max_pack_tokens": 8192},
        optimizer={"distributed": True},
    )
    (found,) = rehearsed([(config, batch(2000, 150_000, 2), rank, 32)])
    assert found["parameters"] > 2.2e9 and found["in schedule"] == {} and found["unplanned"] == {}
