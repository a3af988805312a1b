"""``vcpo convert`` when it is stopped: one line, the exit code of the signal, and the same command goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vcpo_megatron.conversion import partial, verify, writer
from vcpo_megatron.learner.checkpoint import convert as convert_module
from vcpo_megatron.learner.checkpoint.files import CheckpointWriter

from ..conversions import convert, imported_beside
from ..families import make_family


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("llama", tmp_path_factory.mktemp("model") / "hf")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    return imported_beside(folder)


class Interrupted:
    """A file whose ``number``-th write is met by Ctrl-C, as Python's handler of the signal does it."""

    def __init__(self, file: Any, number: int) -> None:
        self._file, self._left = file, number

    def write(self, data: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def interrupt(writer_of: Any, method: str, number: int, patch: pytest.MonkeyPatch) -> None:
    opened: Callable[..., Any] = getattr(writer_of, method)
    once: dict[Any, Interrupted] = {}
    patch.setattr(
        writer_of, method, lambda *a: once.setdefault(a[1], Interrupted(opened(*a), number)) if not once else opened(*a)
    )


@pytest.mark.parametrize("number", [1, 4, 7])
def test_an_interrupted_import_is_130(
    folder: Path, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within torch.save, too, which makes an error of its own of what interrupts it."""
    with monkeypatch.context() as patch:
        interrupt(CheckpointWriter, "_open", number, patch)
        assert convert("import", folder, tmp_path / "out", "--quiet") == 130
    message = "vcpo: error: interrupted; the same command goes on where the work was last recorded\n"
    assert capsys.readouterr().err == message
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    assert convert("import", folder, tmp_path / "out", "--quiet") == 0
    assert convert("verify", folder, tmp_path / "out") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_interrupted_export_and_verify_are_130(
    folder: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        interrupt(writer.FolderWriter, "_stream_of", 1, patch)
        assert convert("export", checkpoint, tmp_path / "out", "--quiet") == 130
        assert "interrupted; the same command goes on" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    assert convert("export", checkpoint, tmp_path / "out", "--quiet") == 0

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "compare", stop)
    assert convert("verify", folder, tmp_path / "out") == 130
    assert capsys.readouterr().err == "vcpo: error: interrupted\n"


@pytest.mark.parametrize("family", ["llama", "deepseek-moe-yarn"])  # the second has biases that stay float32
def test_a_resumed_import_ends_at_100_percent(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, shown, write = make_family(family, tmp_path / "hf"), list[Any](), CheckpointWriter.write

    class Shown(partial.CopyProgress):
        def end(self) -> None:
            shown.append((self._done, self._total, self.line(1.0)))

    def interrupted(self: CheckpointWriter, *arguments: Any) -> None:
        if len(self.entries) == 12:
            raise KeyboardInterrupt
        write(self, *arguments)

    monkeypatch.setattr(convert_module, "CopyProgress", Shown)
    monkeypatch.setattr(convert_module, "SYNC_BYTES", 1)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "write", interrupted)
        assert convert("import", source, tmp_path / "out", "--quiet", "--dtype", "bfloat16") == 130
    assert convert("import", source, tmp_path / "out", "--quiet", "--dtype", "bfloat16") == 0
    (before, total, _), (after, _, line) = shown
    assert 0 < before < after == total and "(100 %)" in line and line.endswith(", 0 s left")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_told_as_ctrl_c_is(
    folder: Path,
    tmp_path: Path,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write = CheckpointWriter.write

    def handler(*_: Any) -> None:
        """That of a program which would go on."""

    def stopped(*arguments: Any) -> None:
        os.kill(os.getpid(), number)
        write(*arguments)

    former = signal.signal(number, handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointWriter, "write", stopped)
            assert convert("import", folder, tmp_path / "out", "--quiet") == 128 + number
        assert signal.getsignal(number) is handler
        signal.signal(number, signal.SIG_IGN)  # as nohup does
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointWriter, "write", stopped)
            assert convert("import", folder, tmp_path / "ignored", "--quiet") == 0
    finally:
        signal.signal(number, former)
    message = f"interrupted by {number.name}; the same command goes on where the work was last recorded"
    assert capsys.readouterr().err == f"vcpo: error: {message}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ignored", "out.partial"]
    assert convert("import", folder, tmp_path / "out", "--quiet") == 0
