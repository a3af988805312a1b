"""What a run exports while it trains is what ``vcpo convert export`` makes of the same step's checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from vcpo_megatron.config.load import dump_resolved
from vcpo_megatron.conversion.errors import ConversionError
from vcpo_megatron.learner.checkpoint.convert import export_hf
from vcpo_megatron.run.directory import RunDirectory

from ..scenarios import make_batch, make_config, make_model_folder
from ..world import run_world

#: directory -> (family, tied, sections of the configuration)
RUNS = {
    "tied pp2 bf16": ("qwen2", True, {"parallel": {"pipeline": 2}, "model": {"dtype": "bfloat16"}}),
    "experts tp2 ep2": ("shared", False, {"parallel": {"tensor": 2, "sequence_parallel": True, "expert": 2}}),
    "no room": ("qwen2", True, {}),
    "off": ("qwen2", True, {"checkpoint": {"export_hf_every": 2}}),
}


@pytest.mark.timeout(300)
def test_exports_equal_those_of_the_checkpoint(tmp_path: Path) -> None:
    cases = []
    for name, (family, tied, sections) in RUNS.items():
        folder = tmp_path / f"{family} {tied}"
        if not folder.exists():
            make_model_folder(folder, family, tied=tied)
            (folder / "chat_template.jinja").write_text("{{ messages }}")
            (folder / "tokenizer_config.json").write_text("{}")
        config = make_config(folder, 2, **{"checkpoint": {"export_hf_every": 1}, **sections})
        run = RunDirectory(tmp_path / name)
        run.path.mkdir()
        run.resolved.write_text(dump_resolved(config))
        cases.append((config, str(run.path)))
    (tmp_path / "no room" / "exports").write_text("a file where the folder would be")
    stale = tmp_path / "tied pp2 bf16" / "exports"
    for left in ("step_1", "step_9.partial"):  # of an attempt that was killed
        (stale / left).mkdir(parents=True)
    batch = make_batch(tmp_path / "qwen2 True")
    found = run_world(2, "learner.run_layouts:export_and_save", {"cases": cases, "batch": batch}, timeout_s=250)
    assert found == [["step_1"], ["step_1"], [], []]  # a failed export ends no run

    for (config, run_dir), family in zip(cases[:2], ("qwen2", "shared"), strict=True):
        run, back = RunDirectory(Path(run_dir)), tmp_path / f"back {family}"
        export_hf(run.checkpoint(1), back, progress=False)
        assert {path.name: path.read_bytes() for path in back.iterdir()} == {
            path.name: path.read_bytes() for path in run.export(1).iterdir()
        }
        names = {path.name for path in back.iterdir()}
        assert {"chat_template.jinja", "tokenizer_config.json", "generation_config.json"} <= names
        kind = torch.bfloat16 if family == "qwen2" else torch.float32
        assert json.loads((back / "config.json").read_text())["dtype"] == str(kind).removeprefix("torch.")
        before, after = (load_file(path / "model.safetensors") for path in (config.model.path, back))
        assert any(not torch.equal(before[name].to(kind), after[name]) for name in after)  # a step was taken
        loaded = AutoModelForCausalLM.from_pretrained(back, dtype="auto").state_dict()
        assert torch.equal(loaded["model.norm.weight"], after["model.norm.weight"])

    changed = run.checkpoint(1) / "__1_0.distcp"
    data = bytearray(changed.read_bytes())
    data[len(data) // 2] ^= 1
    changed.write_bytes(data)
    with pytest.raises(ConversionError, match=r"step_1 has changed .*__1_0.distcp has CRC-32"):
        export_hf(run.checkpoint(1), tmp_path / "not", progress=False)


def test_exports_are_kept_as_checkpoints_are(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for step in (2, 4, 6, 10):
        run.export(step).mkdir(parents=True)
    (run.exports / "step_12.partial").mkdir()
    run.prune(2, keep=[4])
    assert sorted(path.name for path in run.exports.iterdir()) == ["step_10", "step_12.partial", "step_4", "step_6"]
    assert run.abandon_after(6, attempt=3) == []  # there are no checkpoints
    assert not run.export(10).exists() and (run.exports / "abandoned" / "attempt_3" / "step_10").is_dir()
