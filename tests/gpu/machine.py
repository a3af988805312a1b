"""What the checks ran on: versions of everything that has a say in the numbers, and the devices."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "vcpo-megatron",
    "torch",
    "megatron-core",
    "transformers",
    "transformer-engine",
    "transformer-engine-torch",
    "flash-attn",
    "apex",
    "triton",
    "numpy",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
)


def describe() -> dict[str, Any]:
    """Called in a rank, where torch is bound to its device."""
    import torch

    cuda = torch.cuda.is_available()
    versions: dict[str, str] = {"python": platform.python_version(), "commit": _commit()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "none"
    if cuda:
        versions |= {
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "cudnn": str(torch.backends.cudnn.version()),
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        }
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": {"system": platform.platform(), "cores": len(os.sched_getaffinity(0))},
        "versions": versions,
        "devices": [_device(number) for number in range(torch.cuda.device_count())] if cuda else ["cpu"],
    }


def _device(number: int) -> dict[str, Any]:
    import torch

    found = torch.cuda.get_device_properties(number)
    return {
        "name": found.name,
        "bytes": found.total_memory,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
    }


def _commit() -> str:
    """Of the checkout that this file is in, with a mark where it was changed; "unknown" without git."""
    commit = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return commit + " and changes" * bool(changed and commit) or "unknown"


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except subprocess.TimeoutExpired:
        return ""


def summary(machine: dict[str, Any]) -> str:
    """Two lines for people."""
    devices = [d if isinstance(d, str) else f"{d['name']} ({d['bytes'] / 2**30:.0f} GiB)" for d in machine["devices"]]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version != "none")
    return f"{machine['date']}  {', '.join(devices)}\n{versions}"
