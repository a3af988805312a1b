"""What makes a model the same one when a run is resumed: the function that config.json describes, and weights.

Facts are plain JSON, so that a checkpoint's manifest holds them, and say nothing of where the folder is: it may move.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..run.json_file import read_json_object
from .shape import ModelShape

#: Bytes of a block, and blocks of a file, that ``weight_facts`` reads.
_BLOCK, _BLOCKS = 64 << 10, 16


def shape_facts(shape: ModelShape) -> dict[str, Any]:
    """Every field of ``shape`` by its dotted name, as in "rope.theta"; a part that the model lacks has none."""
    return _flat(json.loads(json.dumps(dataclasses.asdict(shape))), "")


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        elif value is not None:
            found[prefix + name] = value
    return found


def weight_facts(folder: Path) -> dict[str, str]:
    """Size and a CRC-32 of every file of weights in ``folder``, by name; OSError or ValueError when one cannot be read.

    The checksum is of 16 blocks of 64 KiB, spread evenly from the header to the end: a megabyte a file, whatever its
    size. Training changes every block, so other weights are found; one byte that was changed may not be.
    """
    index = folder / "model.safetensors.index.json"
    names = set(read_json_object(index)["weight_map"].values()) if index.exists() else {"model.safetensors"}
    return {name: _sampled(folder / name) for name in sorted(names)}


def _sampled(path: Path) -> str:
    size, crc = path.stat().st_size, 0
    with open(path, "rb") as file:
        for block in range(_BLOCKS):
            file.seek(max(size - _BLOCK, 0) * block // (_BLOCKS - 1))
            crc = zlib.crc32(file.read(_BLOCK), crc)
    return f"{size} bytes, CRC-32 {crc:08x}"


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A phrase for each fact that is not the same."""
    return [
        f"{key} {saved.get(key)} in the checkpoint, {now.get(key)} now"
        for key in (*now, *(key for key in saved if key not in now))
        if saved.get(key) != now.get(key)
    ]
