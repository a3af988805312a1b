"""What the supervisor says is safe for a terminal, whoever wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest

from vcpo_megatron.launch.terminal import Terminal

_HOSTILE = "failed: prompt \x1b[31m\ud83d, \x00 and \x9b"
_SAFE = "failed: prompt \\x1b[31m\\ud83d, \\x00 and \\x9b"


@pytest.mark.parametrize("how", ["say", "warn", "complain", "shown_by"])
def test_control_characters_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    terminal, shown = Terminal(), list[str]()
    terminal.keep_in(tmp_path / "log")
    if how == "shown_by":
        with terminal.shown_by(shown.append):
            terminal.say(_HOSTILE)
    else:
        getattr(terminal, how)(_HOSTILE)
    said = "".join(capsys.readouterr()) + "".join(shown)
    assert said.rstrip("\n").endswith(_SAFE)
    assert (tmp_path / "log").read_text().rstrip("\n").endswith(_SAFE)


def test_lines_stay_lines(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().complain("one\ntwo \x1b")
    assert capsys.readouterr().err == "vcpo: error: one\ntwo \\x1b\n"
