"""Which GPUs this host offers to the run, found without importing torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path


def visible_gpus(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> tuple[str, ...]:
    """GPUs as CUDA_VISIBLE_DEVICES names them; none where torch was built without CUDA."""
    try:
        if "+cpu" in metadata.version("torch"):
            return ()
    except metadata.PackageNotFoundError:
        return ()
    return installed_gpus(environ, root)


def installed_gpus(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> tuple[str, ...]:
    """GPUs that the driver shows and CUDA_VISIBLE_DEVICES does not hide, whatever torch can use."""
    nodes = (re.fullmatch(r"nvidia(\d+)", path.name) for path in (root / "dev").glob("nvidia*"))
    present = tuple(sorted((node.group(1) for node in nodes if node), key=int))
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not present:
        return present
    return tuple(name for part in chosen.split(",") if (name := part.strip()) and name != "-1")
