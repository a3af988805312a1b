"""Import, export and verify: what is written, what is refused, and what an interruption or a full disk leaves."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.messages import assert_names
from vcpo_megatron.cli import main as cli
from vcpo_megatron.conversion.errors import ConversionError
from vcpo_megatron.conversion.writer import FolderWriter
from vcpo_megatron.learner.checkpoint import convert
from vcpo_megatron.learner.checkpoint.convert import CheckpointLayout, export_hf, import_hf
from vcpo_megatron.learner.checkpoint.files import CheckpointFiles, CheckpointWriter

from ..families import FAMILIES, make_family, resealed

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    found = {family: make_family(family, root / family) for family in FAMILIES}
    for folder in found.values():
        (folder / "tokenizer.json").write_text("{}")
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    return found


def imported(folder: Path, out: Path, **options: Any) -> Path:
    import_hf(folder, out, options.pop("layout", CheckpointLayout()), vocab_multiple=8, progress=False, **options)
    return out


def verify(*arguments: str | Path) -> int:
    return cli.main(["convert", "verify", *map(str, arguments)])


def same_weights(a: Path, b: Path) -> bool:
    left, right = (
        {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for path in (a, b)
    )
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


LAYOUTS = [CheckpointLayout(*sizes) for sizes in itertools.product((1, 2), repeat=3)]
CASES = [
    pytest.param(family, layout, id=f"{family}-tp{layout.tensor}-pp{layout.pipeline}-ep{layout.expert}")
    for family in FAMILIES
    for layout in LAYOUTS
    if layout.expert == 1 or "moe" in family or "mixtral" in family
]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_there_and_back(folders: dict[str, Path], tmp_path: Path, family: str, layout: CheckpointLayout) -> None:
    checkpoint = imported(folders[family], tmp_path / "checkpoint", layout=layout)
    export_hf(checkpoint, tmp_path / "back", max_file_bytes=20_000, progress=False)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1  # and an index that a reader follows
    assert same_weights(folders[family], tmp_path / "back")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "back" / name).read_bytes() == (folders[family] / name).read_bytes()
    assert not list(tmp_path.glob("*.partial")) and not list((tmp_path / "back").glob("conversion.*"))
    assert verify(folders[family], checkpoint) == verify(folders[family], tmp_path / "back") == 0


def test_the_vocabulary_is_padded_in_the_checkpoint_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = imported(folders["llama"], tmp_path / "checkpoint")
    assert CheckpointFiles(checkpoint).shape("output_layer.weight") == (40, 32)  # 37 rows
    manifest = json.loads((checkpoint / "vcpo_checkpoint.json").read_text())
    assert (manifest["vocabulary"], manifest["padded_vocabulary"]) == (37, 40)
    export_hf(checkpoint, tmp_path / "back", progress=False)
    assert load_file(tmp_path / "back" / "model.safetensors")["lm_head.weight"].shape == (37, 32)


def test_dtype_is_chosen(folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = imported(folders["llama"], tmp_path / "checkpoint", dtype="bfloat16")
    export_hf(checkpoint, tmp_path / "back", progress=False)
    back, original = (load_file(path / "model.safetensors") for path in (tmp_path / "back", folders["llama"]))
    assert all(torch.equal(back[name], tensor.to(torch.bfloat16)) for name, tensor in original.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    assert verify(folders["llama"], checkpoint) == 1
    assert "is float32 in A and bfloat16 in B" in capsys.readouterr().out
    assert verify(folders["llama"], checkpoint, "--cast") == 0


def test_an_interrupted_import_goes_on(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "SYNC_BYTES", 1)
    write, calls = CheckpointWriter.write, []

    def stop_at_ten(*arguments: Any) -> None:
        calls.append(arguments[1].key)
        if len(calls) == 10:
            raise KeyboardInterrupt
        write(*arguments)

    monkeypatch.setattr(CheckpointWriter, "write", stop_at_ten)
    out = tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt):
        imported(folders["qwen3-moe"], out)
    assert not out.exists()
    imported(folders["qwen3-moe"], out)
    assert len(calls) <= 10 + len(CheckpointFiles(out)._places) - 8  # what was recorded is not written again
    assert verify(folders["qwen3-moe"], out) == 0


def test_a_killed_import_goes_on(folders: dict[str, Path], tmp_path: Path) -> None:
    """kill -9 in its middle: nothing under the name that was asked for, and the same command ends the work."""
    out, source = tmp_path / "checkpoint", folders["qwen3-moe"]
    program = f"""
import os, signal
from pathlib import Path
from vcpo_megatron.learner.checkpoint import convert
from vcpo_megatron.learner.checkpoint.files import CheckpointWriter
convert.SYNC_BYTES, write, calls = 1, CheckpointWriter.write, []
def kill_at_ten(*arguments):
    calls.append(1)
    if len(calls) == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    write(*arguments)
CheckpointWriter.write = kill_at_ten
layout = convert.CheckpointLayout()
convert.import_hf(Path({str(source)!r}), Path({str(out)!r}), layout, vocab_multiple=8, progress=False)
"""
    killed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL and not out.exists()
    journal = (tmp_path / "checkpoint.partial" / "conversion.journal.jsonl").read_text().splitlines()
    recorded = [json.loads(line)["done"] for line in journal]
    assert recorded == list(range(1, len(recorded) + 1)) and len(recorded) >= 7
    imported(source, out)
    assert verify(source, out) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_an_interrupted_export_goes_on(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = imported(folders["qwen2"], tmp_path / "checkpoint")
    monkeypatch.setattr(convert, "SYNC_BYTES", 1)
    write, calls = FolderWriter.write, []

    def stop_at_ten(*arguments: Any) -> None:
        calls.append(arguments[1])
        if len(calls) == 10:
            raise KeyboardInterrupt
        write(*arguments)

    monkeypatch.setattr(FolderWriter, "write", stop_at_ten)
    with pytest.raises(KeyboardInterrupt):
        export_hf(checkpoint, tmp_path / "back", max_file_bytes=20_000, progress=False)
    export_hf(checkpoint, tmp_path / "back", max_file_bytes=20_000, progress=False)
    assert calls.count(calls[0]) == 1  # what was recorded is not written again
    assert same_weights(folders["qwen2"], tmp_path / "back")


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fills_leaves_nothing(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: int
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(full, "No space left on device" if full == errno.ENOSPC else "Input/output error")

    monkeypatch.setattr(CheckpointWriter, "write", fail)
    message = "the disk is full" if full == errno.ENOSPC else "Input/output error"
    with pytest.raises(ConversionError, match=message):
        imported(folders["llama"], tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []


def test_the_system_refuses_to_write(
    folders: dict[str, Path], tmp_path: Path, file_size_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    checkpoint = imported(folders["llama"], tmp_path / "checkpoint")
    with file_size_limit(6000):
        with pytest.raises(ConversionError, match="was not written: File too large; nothing"):
            imported(folders["llama"], tmp_path / "second")
        with pytest.raises(ConversionError, match="was not written: File too large; nothing"):
            export_hf(checkpoint, tmp_path / "back", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_too_little_room_is_seen_before(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ConversionError, match=r"has 1\.00 kB free, .* needs 72\.32 kB"):
        imported(folders["llama"], tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []


def damaged(folder: Path, out: Path, **changes: torch.Tensor | None) -> Path:
    """A copy with tensors replaced (None: removed); ``__`` stands for a dot."""
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


BAD: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "missing": ({"model__norm__weight": None}, "misses 1 tensors: model.norm.weight"),
    "extra": ({"model__layers__0__mlp__up__weight": torch.ones(2)}, "does not have: model.layers.0.mlp.up.weight"),
    "nan": ({"model__norm__weight": torch.full((32,), float("nan"))}, "holds 32 nan or infinite values"),
    "dtype": ({"model__norm__weight": torch.ones(32, dtype=torch.int32)}, "is I32; only float32"),
    "mixed": ({"model__norm__weight": torch.ones(32, dtype=torch.bfloat16)}, "several dtypes (bfloat16, float32)"),
    "shape": ({"model__norm__weight": torch.ones(33)}, "model.norm.weight is [33], expected [32]"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_folder_is_one_line_and_leaves_nothing(
    folders: dict[str, Path], tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, message = BAD[fault]
    source = damaged(folders["llama"], tmp_path / "bad", **changes)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    assert cli.main(["convert", "import", str(source), str(tmp_path / "out"), "--quiet"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


def test_bad_arguments(folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(folders["llama"])
    for options, message in (
        (["--tensor", "3"], "--tensor 3 does not divide the 4 attention heads"),
        (["--pipeline", "4"], "--pipeline 4 does not divide the 2 layers"),
        (["--expert", "2"], "--expert 2 does not divide the 1 experts"),
    ):
        assert cli.main(["convert", "import", source, str(tmp_path / "out"), *options]) == 1
        assert message in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    assert cli.main(["convert", "import", source, str(tmp_path / "out")]) == 1
    assert "exists" in capsys.readouterr().err
    (folders["llama"].parent.parent / "resolved.toml").touch()  # two folders up, but of no run that holds this one
    assert cli.main(["convert", "export", source, str(tmp_path / "new")]) == 1
    (folders["llama"].parent.parent / "resolved.toml").unlink()
    assert "neither an imported checkpoint, a run directory" in capsys.readouterr().err


def test_bfloat16_that_overflows_float16_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    source = damaged(folders["llama"], tmp_path / "large", model__norm__weight=torch.full((32,), 1e6))
    with pytest.raises(ConversionError, match=r"model\.norm\.weight overflows float16"):
        imported(source, tmp_path / "out", dtype="float16")


def test_a_checkpoint_cut_short_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = imported(folders["llama"], tmp_path / "checkpoint")
    file = checkpoint / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConversionError, match=r"missing or cut short: __0_0\.distcp"):
        export_hf(resealed(checkpoint), tmp_path / "back", progress=False)
    file.unlink()
    with pytest.raises(ConversionError, match="missing or cut short"):
        export_hf(resealed(checkpoint), tmp_path / "back", progress=False)
    (checkpoint / ".metadata").write_bytes(b"cos\nsystem\n(S'false'\ntR.")  # runs nothing
    with pytest.raises(ConversionError, match="its metadata cannot be read"):
        export_hf(resealed(checkpoint), tmp_path / "back", progress=False)


def test_layers_for_multi_token_prediction_are_named_and_left_out(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = damaged(folders["deepseek-moe"], tmp_path / "mtp", model__layers__2__eh_proj__weight=torch.ones(3, 3))
    assert cli.main(["convert", "import", str(source), str(tmp_path / "out"), "--quiet"]) == 0
    line = "model.layers.2.eh_proj.weight: not imported: a layer for multi-token prediction, which is not trained"
    assert line in capsys.readouterr().out
    beyond = damaged(folders["deepseek-moe"], tmp_path / "beyond", model__layers__3__eh_proj__weight=torch.ones(3, 3))
    assert cli.main(["convert", "import", str(beyond), str(tmp_path / "out2"), "--quiet"]) == 1
    assert "does not have: model.layers.3.eh_proj.weight" in capsys.readouterr().err


def test_biases_that_choose_experts_stay_float32(folders: dict[str, Path], tmp_path: Path) -> None:
    """As DeepSeek stores them: bfloat16 weights, float32 biases."""
    tensors = load_file(folders["deepseek-moe"] / "model.safetensors")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    for key, tensor in tensors.items():
        tensors[key] = tensor if key == name else tensor.to(torch.bfloat16)
    changes = {key.replace(".", "__"): tensor for key, tensor in tensors.items()}
    source = damaged(folders["deepseek-moe"], tmp_path / "bf16", **changes)
    export_hf(imported(source, tmp_path / "checkpoint"), tmp_path / "back", progress=False)
    assert same_weights(source, tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert {k for k, v in back.items() if v.dtype == torch.float32} == {name}


def test_stacked_experts_are_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders["qwen3-moe"])
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    capsys.readouterr()  # progress of transformers
    assert cli.main(["convert", "import", str(tmp_path / "stacked"), str(tmp_path / "out"), "--quiet"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert_names(line, "model.layers.0.mlp.experts.down_proj", "all experts of a layer in one tensor")
    assert "save_original_format=True" in line and not (tmp_path / "out").exists()
    model.save_pretrained(tmp_path / "again", save_original_format=True)  # the remedy
    assert same_weights(folders["qwen3-moe"], tmp_path / "again")


# --- held faults ------------------------------------------------------------------------------


def test_verify_finds_a_swapped_expert(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folders["qwen3-moe"]
    tensors = load_file(source / "model.safetensors")
    one, two = (f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in (1, 2))
    swapped = damaged(
        source, tmp_path / "swapped", **{one.replace(".", "__"): tensors[two], two.replace(".", "__"): tensors[one]}
    )
    checkpoint = imported(swapped, tmp_path / "checkpoint")
    assert verify(source, checkpoint) == 1
    out = capsys.readouterr().out
    assert one in out and f"B has the values of A under {two}" in out


def test_verify_finds_a_padded_row_that_was_exported(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    padded = damaged(folders["llama"], tmp_path / "padded", lm_head__weight=torch.zeros(40, 32))
    assert verify(folders["llama"], padded) == 1
    assert "lm_head.weight is [40, 32], expected [37, 32]" in capsys.readouterr().err
    rows = load_file(folders["llama"] / "model.safetensors")["model.embed_tokens.weight"]
    both = {"lm_head__weight": torch.zeros(40, 32), "model__embed_tokens__weight": torch.cat([rows, rows[:3]])}
    told = damaged(folders["llama"], tmp_path / "told", **both)  # and the configuration agrees with its tensors
    config = json.loads((told / "config.json").read_text())
    (told / "config.json").write_text(json.dumps({**config, "vocab_size": 40}))
    assert verify(imported(folders["llama"], tmp_path / "checkpoint"), told) == 1
    assert_names(capsys.readouterr().out, "config.json: vocab_size", "37 in A", "40 in B")


def test_verify_finds_a_missing_bias(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "model.layers.1.self_attn.k_proj.bias"
    assert verify(folders["qwen2"], damaged(folders["qwen2"], tmp_path / "x", **{name.replace(".", "__"): None})) == 1
    assert f"misses 1 tensors: {name}" in capsys.readouterr().err


def test_verify_finds_faults_of_a_checkpoint(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint that a faulty writer made: a bias left out, two experts in each other's place."""
    write = CheckpointWriter.write

    def without_bias(*arguments: Any) -> None:
        if "linear_qkv.bias" not in arguments[1].key:
            write(*arguments)

    def swapped(self: CheckpointWriter, place: Any, *rest: Any) -> None:
        key = place.key
        if "linear_fc2" in key and place.index in ((1, 0), (1, 1)):  # layer, expert
            place = dataclasses.replace(place, index=(1, 1 - place.index[1]))
        write(self, place, *rest)

    for family, fault, message in (
        ("qwen2", without_bias, "misses 1 tensors: decoder.layers.self_attention.linear_qkv.bias"),
        ("qwen3-moe", swapped, "B has the values of A under model.layers.1.mlp.experts.1.down_proj.weight"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointWriter, "write", fault)
            checkpoint = imported(folders[family], tmp_path / family)
        assert verify(folders[family], checkpoint) == 1
        said = capsys.readouterr()
        assert message in said.out + said.err, said


def test_verify_finds_one_element_and_another_configuration(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = load_file(folders["llama"] / "model.safetensors")["model.norm.weight"]
    weight[5] += 0.5
    changed = damaged(folders["llama"], tmp_path / "changed", model__norm__weight=weight)
    assert verify(folders["llama"], changed) == 1
    assert "model.norm.weight[5]" in (out := capsys.readouterr().out) and "1 of 32 elements differ, by 0.5" in out
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert verify(folders["llama"], changed) == 1
    assert_names(capsys.readouterr().out, "rms_norm_eps", "1e-06 in A", "0.001 in B")
