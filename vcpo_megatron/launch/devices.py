"""Which GPUs this host offers to the run, found without importing torch."""

from __future__ import annotations

import itertools
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
    """GPUs that the driver shows and CUDA_VISIBLE_DEVICES does not hide, whatever torch can use.

    The driver's nodes bear the host's numbers: /dev/nvidia4 and nvidia5 of a container are CUDA's devices 0 and 1.
    """
    nodes = (re.fullmatch(r"nvidia\d+", path.name) for path in (root / "dev").glob("nvidia*"))
    present = tuple(str(number) for number in range(sum(node is not None for node in nodes)))
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not present:
        return present
    names = (name for part in chosen.split(",") if (name := part.strip()))
    return tuple(itertools.takewhile(lambda name: not name.startswith("-"), names))
