"""Standard output and error that cannot be written: who is told, and what goes on."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vcpo_megatron.run.output import named_output, surviving

ROOT = Path(__file__).parents[2]


class Broken(io.StringIO):
    """Raises ``code`` as long as it is set; ``tries`` counts."""

    def __init__(self, code: int | None) -> None:
        super().__init__()
        self.code, self.tries = code, 0

    def write(self, text: str) -> int:
        self.tries += 1
        if self.code is not None:
            raise OSError(self.code, os.strerror(self.code))
        return super().write(text)


@pytest.mark.parametrize(
    ("code", "again"),
    [(errno.EPIPE, False), (errno.EIO, False), (errno.EBADF, False), (errno.ENOSPC, True), (errno.EDQUOT, True)],
)
def test_work_survives_its_output(monkeypatch: pytest.MonkeyPatch, code: int, again: bool) -> None:
    stream, told = Broken(code), list[OSError]()
    monkeypatch.setattr(sys, "stdout", stream)
    with surviving(told.append):
        print("one", flush=True)
        print("two", flush=True)
        stream.code = None
        print("three", flush=True)
    assert [(error.filename, error.errno) for error in told] == [("standard output", code)]
    assert stream.getvalue() == ("three\n" if again else "")
    assert sys.stdout is stream


def test_without_surviving_the_error_names_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Broken(errno.ENOSPC))
    with named_output(), pytest.raises(OSError, match="No space left on device: 'standard error'"):
        print("lost", file=sys.stderr)


@pytest.mark.parametrize(
    ("encoding", "text", "written"),
    [
        ("utf-8", "half \ud83d and \udcff", b"half \\ud83d and \\udcff"),
        ("ascii", "caf\u00e9 \U0001f600", b"caf\\xe9 \\U0001f600"),
        ("latin-1", "caf\u00e9 \ud83d", b"caf\xe9 \\ud83d"),
    ],
)
def test_what_an_encoding_cannot_hold_is_escaped(
    monkeypatch: pytest.MonkeyPatch, encoding: str, text: str, written: bytes
) -> None:
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding=encoding))
    with surviving():
        print(text, end="", flush=True)
    assert buffer.getvalue() == written


@pytest.mark.parametrize("closed", ["1", "2", "0,1,2"])
def test_closed_standard_streams_are_never_another_file(tmp_path: Path, closed: str) -> None:
    """Else the next file that is opened gets their numbers, and what anybody prints is in it."""
    program = (
        "import os, sys\nfrom vcpo_megatron.run.output import open_standard_streams\n"
        f"open_standard_streams()\nfile = open({str(tmp_path / 'file')!r}, 'w')\n"
        "os.write(1, b'on 1'); os.write(2, b'on 2'); print('out'); print('err', file=sys.stderr)\n"
        f"open({str(tmp_path / 'numbers')!r}, 'w').write(str(file.fileno()))\n"
    )
    redirections = " ".join(f"{number}{'<' if number == '0' else '>'}&-" for number in closed.split(","))
    command = ["bash", "-c", f'exec "{sys.executable}" -c "$1" {redirections}', "sh", program]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=30, check=False
    )
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == "" and int((tmp_path / "numbers").read_text()) > 2
