"""A checkpoint whose bytes have changed, sizes being right, is refused by name on every rank, with what to do."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from tests.messages import assert_names
from vcpo_megatron.run.directory import RunDirectory

from ..scenarios import make_batch, make_config, make_model_folder
from ..world import run_world

#: Written by a rank's thread (two of them), by rank 0 at the end, by every rank at the start.
CHANGES = ["__0_0.distcp", "__1_0.distcp", "common.pt", ".metadata", "rng/rank_1.pt"]


@pytest.mark.timeout(300)
def test_changed_bytes_are_found_in_every_kind_of_file(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "model", layers=2)
    config = make_config(model, 2, parallel={"tensor": 2}, algorithm={"kl_reference": "initial", "kl_coef": 0.01})
    directory = RunDirectory(tmp_path / "run")
    arguments = {
        "config": config,
        "batches": [make_batch(model, n) for n in (0, 1)],
        "run_dir": str(directory.path),
        "changes": CHANGES,
    }
    whole, *told, rope, weights, size = run_world(
        2, "learner.run_checkpoints:loads_after_changes", arguments, timeout_s=250
    )
    assert whole == ""
    for name, message in zip(CHANGES, told, strict=True):
        assert_names(message, f"checkpoint {directory.checkpoint(2)} has changed", f"{name} has", "--from-step 1")
    start = f"{directory.checkpoint(2)} does not fit this run: "
    assert_names(rope, f"{start}norm_eps 1e-06", "0.5 now", "rope.theta 10000.0", "123.0 now")
    assert str(model) in rope
    assert weights.startswith(start + "weights model.safetensors ") and " bytes, CRC-32 " in weights
    assert size.startswith(start + "hidden_size 32 in the checkpoint, 7 now; ")
    manifest = json.loads((directory.checkpoint(2) / "manifest.json").read_text())
    assert set(CHANGES) <= manifest["checksums"].keys() == manifest["files"].keys()
    for name, crc in manifest["checksums"].items():  # those of the writers' threads, too
        assert zlib.crc32((directory.checkpoint(2) / name).read_bytes()) == crc, name
