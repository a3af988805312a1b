"""What a user types to continue a run, in any folder and shell: with the paths where Python finds its code."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from ..config.schema import RunConfig
from ..run.directory import RunDirectory

#: The folder that holds this package.
_HOME = Path(__file__).resolve().parents[2]


def resume_command(directory: RunDirectory, config: RunConfig) -> str:
    """The command that continues the run in ``directory``, whose configuration is ``config``."""
    name = _own_name()
    folders = list(dict.fromkeys(map(str, _module_folders(config, by_module=name.endswith(" -m vcpo_megatron")))))
    variable = f"PYTHONPATH={shlex.quote(os.pathsep.join(folders))} " if folders else ""
    return f"{variable}{name} train --resume --run-dir {shlex.quote(str(directory.path))}"


def _own_name() -> str:
    """How a user calls this program: ``vcpo``, and where that is not on PATH the script that runs, or the module."""
    script = os.path.abspath(sys.argv[0])
    if shutil.which("vcpo"):
        return "vcpo"
    if os.path.basename(script) == "vcpo":
        return shlex.quote(script)
    return f"{shlex.quote(sys.executable)} -m vcpo_megatron"


def _module_folders(config: RunConfig, *, by_module: bool) -> Iterator[Path]:
    """Folders of PYTHONPATH, from the root, and the working directory where ``python -m`` searches it: those that may
    hold the user's environment, or this package."""
    entries = os.environ.get("PYTHONPATH", "")
    searched = [Path(entry or ".") for entry in entries.split(os.pathsep)] if entries else []
    if by_module:
        searched.append(Path())
    module, own, _ = config.environment.name.partition(":")
    for folder in map(Path.resolve, searched):
        top = folder / module.partition(".")[0]
        if folder == _HOME or (own and (top.is_dir() or top.with_name(f"{top.name}.py").is_file())):
            yield folder
