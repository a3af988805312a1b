"""``vcpo convert`` and the checkpoints it reads: of runs, by whatever path; of imports, as they were written."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import pytest

from tests.messages import assert_names
from vcpo_megatron.config.load import dump_resolved
from vcpo_megatron.run.directory import Manifest, RunDirectory
from vcpo_megatron.run.integrity import unsealed

from ..conversions import convert, imported_beside
from ..families import make_family
from ..scenarios import make_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("llama", tmp_path_factory.mktemp("model") / "hf")


@pytest.fixture(scope="module")
def imported(folder: Path) -> Path:
    return imported_beside(folder)


@pytest.fixture
def checkpoint(imported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(imported, tmp_path / "checkpoint"))


@pytest.fixture
def run(folder: Path, imported: Path, tmp_path: Path) -> RunDirectory:
    """A run with the checkpoints 6 (abandoned by attempt 2) and 9, and an export."""
    directory = RunDirectory(tmp_path / "run")
    for step in (6, 9):
        shutil.copytree(imported, directory.checkpoint(step), ignore=shutil.ignore_patterns("hf", "vcpo_*"))
        directory.complete(step, Manifest(step=step, attempt=1, version_number=step, learner={}, orchestrator={}))
    (directory.checkpoints / "abandoned" / "attempt_2").mkdir(parents=True)
    directory.checkpoint(6).rename(directory.checkpoints / "abandoned" / "attempt_2" / "step_6")
    shutil.copytree(folder, directory.export(9))
    directory.resolved.write_text(dump_resolved(make_config(folder, 10)))
    return directory


def flip(file: Path) -> None:
    """Change one bit in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


# --- of a run ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "out", ["checkpoints/step_7", "exports/step_4", "checkpoints/abandoned/attempt_3/step_9", "exports/mine", "mine"]
)
def test_nothing_is_put_into_a_run(
    folder: Path, run: RunDirectory, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is made of what: the run would take it for its own, and remove it."""
    before = sorted(run.path.rglob("*"))
    (link := run.path.with_name("link")).symlink_to(run.path)
    for source in (run.path, run.checkpoint(9), link / "checkpoints" / "abandoned" / "attempt_2" / "step_6"):
        assert convert("export", source, run.path / out, "--quiet") == 1
        assert "where a run keeps its own" in (said := capsys.readouterr().err) or "which is only read" in said
    for source in (folder, run.export(9)):
        assert convert("import", source, link / out, "--quiet") == 1
        assert_names(capsys.readouterr().err, f"lies in {run.path}", "a run keeps its own")
    assert sorted(run.path.rglob("*")) == before


def test_a_copy_of_a_configuration_makes_no_run(folder: Path, run: RunDirectory, tmp_path: Path) -> None:
    shutil.copyfile(run.resolved, tmp_path / "resolved.toml")
    assert convert("import", folder, tmp_path / "out", "--quiet") == 0


def test_a_checkpoint_by_any_path(
    folder: Path, run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(run.checkpoint(9))
    (tmp_path / "best").symlink_to(run.path)
    abandoned = run.checkpoints / "abandoned" / "attempt_2" / "step_6"
    sources = [tmp_path / "link", tmp_path / "best", tmp_path / "link" / ".." / "step_9", abandoned]
    for number, source in enumerate(sources):
        assert convert("export", source, tmp_path / str(number), "--quiet") == 0
        assert convert("verify", folder, tmp_path / str(number)) == 0
    for inside in (run.path, run.checkpoint(9), abandoned):
        with monkeypatch.context() as patch:
            patch.chdir(inside)
            assert convert("export", ".", tmp_path / f"of {inside.name}", "--quiet") == 0


def test_what_lies_in_a_run_and_is_no_checkpoint(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in (run.checkpoints, run.checkpoints / "abandoned", run.export(9), run.checkpoints / "abandoned" / ".."):
        assert convert("export", source, tmp_path / "out", "--quiet") == 1
        assert_names(capsys.readouterr().err, f"{source} is neither", "imported checkpoint", "run directory")


# --- checksums --------------------------------------------------------------------------------


def test_an_import_knows_its_files(checkpoint: Path) -> None:
    checksums = json.loads((checkpoint / "vcpo_checkpoint.json").read_text())["checksums"]
    files = {str(path.relative_to(checkpoint)): path for path in checkpoint.rglob("*") if path.is_file()}
    del files["vcpo_checkpoint.json"]
    assert {"__0_0.distcp", ".metadata", "metadata.json", "hf/config.json"} <= files.keys()
    assert checksums == {name: zlib.crc32(path.read_bytes()) for name, path in files.items()}


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "common.pt", "hf/generation_config.json"])
def test_one_bit_of_an_import(
    folder: Path, checkpoint: Path, tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(checkpoint / file)
    for arguments in (("export", checkpoint, tmp_path / "out", "--quiet"), ("verify", folder, checkpoint)):
        assert convert(*arguments) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert_names(line, f"{checkpoint} has changed", f"{file} has CRC-32")
    assert not (tmp_path / "out").exists()


def test_a_file_of_an_import_that_is_gone(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint / "hf" / "generation_config.json").unlink()
    assert convert("export", checkpoint, tmp_path / "out", "--quiet") == 1
    assert_names(capsys.readouterr().err, "hf/generation_config.json", "No such file or directory")


@pytest.mark.parametrize("text", ["", "[]", '{"crc32": 1}', '{"checksums": 3}', '{"checksums": {"common.pt": "x"}}'])
def test_a_damaged_manifest_of_an_import(
    checkpoint: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "vcpo_checkpoint.json").write_text(text)
    assert convert("export", checkpoint, tmp_path / "out", "--quiet") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{checkpoint / 'vcpo_checkpoint.json'} is damaged" in line


def test_a_manifest_without_a_checksum_is_damaged(
    checkpoint: Path, run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (checkpoint / "vcpo_checkpoint.json", run.checkpoint(9) / "manifest.json"):
        path.write_text(json.dumps(unsealed(path.read_bytes())))
        assert convert("export", path.parent, tmp_path / "out", "--quiet") == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{path} is damaged: it has no checksum" in line
