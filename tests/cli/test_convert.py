"""``vcpo convert`` before torch is imported; tests/learner/checkpoint has the rest."""

from __future__ import annotations

from pathlib import Path

from tests.cli.commands import without_torch


def test_cheap_refusals_of_convert_need_no_torch(tmp_path: Path) -> None:
    here, missing, other = str(tmp_path / "here"), str(tmp_path / "none"), str(tmp_path / "other")
    for folder in (here, other):
        Path(folder).mkdir()
    for arguments, says in (
        (["import", missing, "out"], f"{missing} does not exist or is not a folder"),
        (["import", here, other], f"{other} exists: give another name, or remove it"),
        (["export", missing, "out"], f"{missing} does not exist or is not a folder"),
        (["verify", here, missing], f"{missing} does not exist or is not a folder"),
    ):
        result = without_torch("convert", *arguments)
        assert (result.returncode, result.stderr) == (1, f"vcpo: error: {says}\n")
