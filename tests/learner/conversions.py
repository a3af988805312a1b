"""``vcpo convert`` as tests of it call it."""

from __future__ import annotations

from pathlib import Path

from vcpo_megatron.cli import main as cli
from vcpo_megatron.learner.checkpoint.convert import CheckpointLayout, import_hf


def convert(*arguments: str | Path) -> int:
    """Exit code of ``vcpo convert ARGUMENTS``, in this process."""
    return cli.main(["convert", *map(str, arguments)])


def imported_beside(folder: Path) -> Path:
    """The checkpoint of a model folder."""
    out = folder.with_name("checkpoint")
    import_hf(folder, out, CheckpointLayout(), vocab_multiple=8, progress=False)
    return out
