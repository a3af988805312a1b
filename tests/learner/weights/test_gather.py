"""What the sender sends, by every transport and split of the model, is byte for byte the Hugging Face folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ..families import make_family
from ..scenarios import make_config
from ..world import run_world

pytestmark = pytest.mark.timeout(550)  # the first one waits for the world

LAYOUTS = {
    "tp2": ("qwen2-tied-yarn", {"tensor": 2}),
    "pp2": ("qwen2-tied-yarn", {"pipeline": 2}),
    "ep2": ("qwen3-moe", {"expert": 2}),
    "tp2 ep2": ("qwen3-moe", {"tensor": 2, "expert": 2}),
}
TRANSPORTS = ("tensor", "disk", "distributed")
BUCKET_BYTES = 8000
CASES = [(layout, transport) for layout in LAYOUTS for transport in TRANSPORTS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("weights")
    return {name: make_family(name, root / name) for name in {family for family, _ in LAYOUTS.values()}}


@pytest.fixture(scope="module")
def outcomes(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    configs = []
    for layout, transport in CASES:
        family, parallel = LAYOUTS[layout]
        rollout = {"sync": transport, "bucket_bytes": BUCKET_BYTES, "verify_sync": True}
        configs.append(make_config(folders[family], 2, parallel=parallel, rollout=rollout))
    arguments = {"cases": configs, "run_dir": str(tmp_path_factory.mktemp("runs"))}
    found = dict(zip(CASES, run_world(2, "learner.run_weights:send_each", arguments, timeout_s=500), strict=True))
    return lambda layout, transport: found[layout, transport]


@pytest.mark.parametrize(("layout", "transport"), CASES)
def test_bytes_that_arrive_are_those_of_the_folder(
    layout: str, transport: str, outcomes: Callable[[str, str], Any], folders: dict[str, Path]
) -> None:
    expected = load_file(folders[LAYOUTS[layout][0]] / "model.safetensors")
    got = outcomes(layout, transport)["tensors"]
    assert sorted(got) == sorted(expected)  # tied: the embedding once; padded rows: none
    assert all(torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype for name, tensor in expected.items())


@pytest.mark.parametrize(("layout", "transport"), CASES)
def test_the_sixth_version_is_what_the_parameters_were_then(
    layout: str, transport: str, outcomes: Callable[[str, str], Any], folders: dict[str, Path]
) -> None:
    """Memory of released versions is used again, and every version is sent as it was when it was published."""
    for name, tensor in load_file(folders[LAYOUTS[layout][0]] / "model.safetensors").items():
        for _ in range(5):
            tensor = tensor + 1.0
        assert torch.equal(outcomes(layout, transport)["last"][name], tensor), name


@pytest.mark.parametrize(("layout", "transport"), CASES)
def test_checksums_are_those_of_the_folders_bytes(
    layout: str, transport: str, outcomes: Callable[[str, str], Any], folders: dict[str, Path]
) -> None:
    expected = {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]
        for name, tensor in load_file(folders[LAYOUTS[layout][0]] / "model.safetensors").items()
    }
    if "tied" in LAYOUTS[layout][0]:
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    assert outcomes(layout, transport)["checksums"] == expected


def test_the_plan_keeps_to_the_bucket_size(outcomes: Callable[[str, str], Any]) -> None:
    plan = outcomes("pp2", "distributed")["buckets"]
    sizes = [[4 * torch.Size(shape).numel() for _, _, shape in bucket] for bucket in plan]
    assert len(plan) > 3 and all(sum(bucket) <= BUCKET_BYTES or len(bucket) == 1 for bucket in sizes)
    assert any(len(bucket) > 1 for bucket in sizes)
