"""``vcpo convert`` as it is used: bad arguments, Ctrl-C, files of others, verdicts that no order changes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.messages import assert_names, assert_said
from vcpo_megatron.cli import convert as cli_convert
from vcpo_megatron.cli import main as cli
from vcpo_megatron.conversion import partial
from vcpo_megatron.conversion.verify import FolderTensors
from vcpo_megatron.learner.checkpoint.convert import CheckpointLayout, OpenedCheckpoint, import_hf
from vcpo_megatron.run.directory import Manifest, RunDirectory

from ..conversions import convert, imported_beside
from ..families import make_family, resealed

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("llama", tmp_path_factory.mktemp("model") / "hf")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    return imported_beside(folder)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def with_config(folder: Path, out: Path, **changes: Any) -> Path:
    shutil.copytree(folder, out)
    config = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, **changes}))
    return out


# --- arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "option", "values"),
    [
        ("export", "--max-shard-gb", ("nan", "inf", "0", "-1", "1e300", "1e-10", "many")),
        ("verify", "--tolerance", ("nan", "inf", "-1", "little", "١")),
        ("import", "--vocab-multiple", ("0", "-8", "1.5", "١٢٨")),
    ],
)
def test_bad_numbers_are_bad_usage(
    action: str, option: str, values: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for value in values:
        with pytest.raises(SystemExit) as caught:
            convert(action, "a", "b", option, value)
        assert caught.value.code == 2
        assert f"argument {option}: '{value}' is no " in capsys.readouterr().err


def test_good_numbers_are_taken() -> None:
    export = cli._parser().parse_args(["convert", "export", "a", "b", "--max-shard-gb", "0.5"])
    compared = cli._parser().parse_args(["convert", "verify", "a", "b", "--tolerance", "0"])
    assert (export.max_shard_gb, compared.tolerance) == (0.5, 0.0)


def test_an_absurd_padding_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "out"
    for multiple in ("1025", "1000000000000"):
        assert convert("import", folder, out, "--quiet", "--vocab-multiple", multiple) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert_names(line, f"--vocab-multiple {multiple}", "37 rows", "padding")
    assert list(tmp_path.iterdir()) == []
    assert convert("import", folder, out, "--quiet", "--vocab-multiple", "1024") == 0


@pytest.mark.parametrize("options", [["--prompts", "p"], ["--tolerance", "1"]])
def test_options_of_log_probs_need_log_probs(
    folder: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert("verify", folder, folder, *options) == 2
    assert f"{options[0]} is about log-probs: give --logprobs too" in capsys.readouterr().err
    assert convert("verify", folder, "http://127.0.0.1:1", "--cast") == 2
    assert "--cast compares tensors, which http://127.0.0.1:1 does not show" in capsys.readouterr().err


def test_only_what_is_wrong_with_a_layout_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No layer of this model has a dense MLP, and every head has a key head of its own."""
    folder = make_family("deepseek-moe-yarn", tmp_path / "hf")
    capsys.readouterr()  # progress of transformers
    assert convert("import", folder, tmp_path / "out", "--tensor", "5", "--vocab-multiple", "5") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert_names(line, "--tensor 5", "the 4 attention heads", "--tensor 5", "the 48 units")
    assert "key-value heads" not in line and "units of the MLP" not in line


# --- places -----------------------------------------------------------------------------------


def test_a_source_is_never_written_into(
    folder: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = bytes_of(folder), bytes_of(checkpoint)
    for action, source in (("import", folder), ("export", checkpoint)):
        for out in (source, source / "out", source / "hf" / "out", source / "a" / "b" / "out"):
            assert convert(action, source, out, "--quiet") == 1
            (line,) = capsys.readouterr().err.splitlines()
            assert "which is only read: give a name elsewhere" in line
    assert (bytes_of(folder), bytes_of(checkpoint)) == before
    shutil.copytree(folder, moved := tmp_path / "out.partial")  # whose name is that of the work on out
    assert convert("import", moved, tmp_path / "out", "--quiet") == 1
    assert bytes_of(moved) == before[0]


def test_what_others_have_put_at_the_partial_is_kept(
    folder: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.partial").mkdir()
    (tmp_path / "one.partial" / "thesis.tex").write_text("years")
    (tmp_path / "two.partial").write_text("years")
    before = bytes_of(tmp_path)
    for action, source in (("import", folder), ("export", checkpoint)):
        for name in ("one", "two"):
            assert convert(action, source, tmp_path / name, "--quiet") == 1
            (line,) = capsys.readouterr().err.splitlines()
            assert f"{name}.partial, where " in line and "move it away, or give another name" in line
    assert bytes_of(tmp_path) == before


def test_a_place_that_cannot_be_written_is_named(
    folder: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for action, source in (("import", folder), ("export", checkpoint)):
        assert convert(action, source, tmp_path / "file" / "out", "--quiet") == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{tmp_path / 'file' / 'out'} was not written" in line and "Not a directory" in line
        assert convert(action, "x" * 300, tmp_path / "out", "--quiet") == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{'x' * 300}" in line and line.endswith("File name too long")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_dangling_tokenizer_is_not_left_out(
    folder: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, other = tmp_path / "hf", tmp_path / "checkpoint"
    shutil.copytree(folder, source)
    shutil.copytree(checkpoint, other)
    for action, path, beside in (("import", source, source), ("export", other, other / "hf")):
        (beside / "tokenizer.json").symlink_to("../../blobs/gone")
        assert convert(action, path, tmp_path / "out", "--quiet") == 1
        assert_names(capsys.readouterr().err, beside, "do not exist: tokenizer.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "hf"]


# --- configurations ---------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", [["float32"], {"a": 1}, 32])
def test_a_dtype_that_is_no_name(
    folder: Path, tmp_path: Path, key: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = with_config(folder, tmp_path / "bad", **{key: value})
    for arguments in (("import", bad, tmp_path / "out", "--quiet"), ("verify", bad, bad, "--logprobs")):
        assert convert(*arguments) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{key} = " in line and "is not the name of a dtype" in line
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_a_checkpoint_whose_configuration_is_nested_without_end(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("hf/config.json", "metadata.json"):
        shutil.copytree(checkpoint, bad := tmp_path / name.replace("/", "."))
        (bad / name).write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
        assert convert("export", resealed(bad), tmp_path / "out", "--quiet") == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "cannot be read" in line and "recursion" in line


def test_a_byte_order_mark(folder: Path, tmp_path: Path) -> None:
    """It is taken, and goes no further: no engine reads it."""
    shutil.copytree(folder, marked := tmp_path / "marked")
    plain = (folder / "config.json").read_bytes()
    (marked / "config.json").write_bytes(b"\xef\xbb\xbf" + plain)
    assert convert("verify", folder, marked) == 0
    assert convert("import", marked, tmp_path / "checkpoint", "--quiet") == 0
    assert convert("export", tmp_path / "checkpoint", tmp_path / "back", "--quiet") == 0
    assert (tmp_path / "checkpoint" / "hf" / "config.json").read_bytes() == plain
    assert (tmp_path / "back" / "config.json").read_bytes() == plain


# --- names ------------------------------------------------------------------------------------


def test_names_reach_the_terminal_as_text(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder, bad := tmp_path / "bad")
    tensors = load_file(bad / "model.safetensors")
    save_file({**tensors, "\x1b[2J\u202eclear": torch.ones(1)}, bad / "model.safetensors", metadata={"format": "pt"})
    assert convert("import", bad, tmp_path / "out", "--quiet") == 1
    assert_names(capsys.readouterr().err, "1 tensors", "LlamaForCausalLM with 2 layers", r"\x1b[2J\u202eclear")
    changed = with_config(folder, tmp_path / "changed", **{"\x1b[2J": 1})
    assert convert("verify", folder, changed) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert_names(line, "A and B differ", r"config.json: \x1b[2J is None in A", "1 in B")


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii:strict"])
def test_a_name_that_is_no_utf_8(folder: Path, tmp_path: Path, encoding: str) -> None:
    out = os.fsencode(tmp_path) + b"/caf\xe9 \xc3\xa9"
    command = [sys.executable, "-m", "vcpo_megatron", "convert", "import", os.fsencode(folder), out]
    done = subprocess.run(
        command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding}, cwd=ROOT, timeout=300
    )
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
    name = "caf\\udce9 \\xe9" if encoding.startswith("ascii") else "caf\\udce9 é"
    assert done.stdout.decode() == f"{tmp_path}/{name}: imported from {folder}\n"
    assert os.path.exists(out + b"/metadata.json")


def test_errors_at_the_start_are_the_outputs_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(13, os.strerror(13), str(tmp_path / "out.partial"))

    monkeypatch.setattr(partial.Path, "mkdir", denied)
    assert convert("import", folder, tmp_path / "out", "--quiet") == 1
    assert_names(capsys.readouterr().err, f"{tmp_path / 'out'} was not written", "Permission denied")
    assert list(tmp_path.iterdir()) == []


# --- verdicts ---------------------------------------------------------------------------------


def test_the_checksum_is_that_of_either_order(
    folder: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for a, b in ((folder, checkpoint), (checkpoint, folder), (folder, folder)):
        assert convert("verify", a, b) == 0
        said.append(capsys.readouterr().out)
    assert "equal, SHA-256 " in said[0] and said[0] == said[1] == said[2]


def test_equal_values_elsewhere_are_no_permutation(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two norms of a layer are ones in A; in B one of them has changed, and nothing has moved."""
    ones, twos = tmp_path / "ones", tmp_path / "twos"
    names = [f"model.layers.0.{name}_layernorm.weight" for name in ("input", "post_attention")]
    for path, values in ((ones, (1.0, 1.0)), (twos, (2.0, 1.0))):
        shutil.copytree(folder, path)
        tensors = load_file(path / "model.safetensors")
        tensors |= {name: torch.full((32,), value) for name, value in zip(names, values, strict=True)}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert convert("verify", ones, twos) == 1
    out = capsys.readouterr().out
    assert_names(out, f"{names[0]}[0]", "1 in A", "2 in B", "32 of 32 elements", "by 1 at most")


@pytest.mark.parametrize("swap", [False, True])
def test_the_wider_tolerance_of_both_sides_counts(
    folder: Path, tmp_path: Path, swap: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import_hf(folder, tmp_path / "half", CheckpointLayout(), dtype="bfloat16", vocab_multiple=8, progress=False)
    sides = {str(folder): torch.tensor([-1.0]), str(tmp_path / "half"): torch.tensor([-1.04])}
    monkeypatch.setattr(cli_convert, "_logprobs", lambda name, *_: [sides[name]])
    names = list(sides)[::-1] if swap else list(sides)
    assert convert("verify", *names, "--cast", "--logprobs") == 0
    assert "equal to 0.04 (at most 0.05)" in capsys.readouterr().out
    assert convert("verify", *names, "--cast", "--logprobs", "--tolerance", "0.01") == 1


def test_what_each_side_computes_in(folder: Path, tmp_path: Path) -> None:
    """A folder: what it states, or else what it stores. A checkpoint: what it stores, whatever config.json says."""
    import_hf(folder, tmp_path / "half", CheckpointLayout(), dtype="float16", vocab_multiple=8, progress=False)
    assert OpenedCheckpoint(tmp_path / "half").computes_in == torch.float16
    assert OpenedCheckpoint(tmp_path / "half").config["dtype"] == "float32"
    assert FolderTensors(folder).computes_in == torch.float32
    assert FolderTensors(with_config(folder, tmp_path / "a", dtype="bfloat16")).computes_in == torch.bfloat16
    tensors = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
    silent = with_config(folder, tmp_path / "b", dtype=None)
    save_file(tensors, silent / "model.safetensors", metadata={"format": "pt"})
    assert FolderTensors(silent).computes_in == torch.float16


def test_a_run_whose_newest_checkpoint_was_lost_is_not_exported_from_an_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.checkpoint(1).mkdir(parents=True)
    directory.complete(1, Manifest(step=1, attempt=1, version_number=1, learner={}, orchestrator={}))
    directory.resolved.write_text('[model]\npath = "/m"\n[train]\nsteps = 2\n[environment]\nname = "e"\n')
    (directory.checkpoints / "latest").write_text("step_2\n")
    assert convert("export", directory.path, tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert_said("vcpo convert", "newest checkpoint of a run is lost", said, checkpoints=directory.checkpoints)
    assert not (tmp_path / "out").exists()
