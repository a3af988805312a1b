"""Writing a Hugging Face folder's weights: safetensors files and their index, one tensor at a time.

The order and the sizes of all tensors are known before the first one, so each file's header is written
first and its data follow: memory holds one tensor. Format: 8 bytes little-endian length of the header, the
header as JSON, then the tensors.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..models.dtypes import SAFETENSORS_NAMES
from .dtypes import dtype_name
from .errors import ConversionError
from .hf import INDEX, SINGLE
from .partial import carry_over

#: Size of one weight file, unless a single tensor is larger.
FILE_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Slot:
    """Where a tensor goes: file, first byte in it, bytes, shape."""

    file: str
    offset: int
    length: int
    shape: tuple[int, ...]


class FolderWriter:
    """Writes tensors in the order of ``tensors``; ``done`` of them are on the disk already.

    tensors        name -> shape, in the order in which they will be written
    dtypes         name -> dtype
    max_file_bytes a file is closed before a tensor that would make it longer
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        max_file_bytes: int,
        done: int = 0,
    ) -> None:
        self._path, self._dtypes = path, dtypes
        self._slots, self._headers = _plan(tensors, dtypes, max_file_bytes)
        self._order = list(tensors)
        self.done = done
        self._stream: Any = None
        self._open_file = ""

    @property
    def bytes_total(self) -> int:
        return sum(slot.length for slot in self._slots.values())

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor; ConversionError when it is not the next, or of another shape."""
        if self.done >= len(self._order) or name != self._order[self.done]:
            raise ConversionError(f"{name} is not what comes next in {self._path}")
        slot = self._slots[name]
        if tuple(tensor.shape) != slot.shape:
            raise ConversionError(f"{name} has shape {list(tensor.shape)}, expected {list(slot.shape)}")
        stream = self._stream_of(slot.file)
        stream.seek(slot.offset)
        stream.write(tensor.to(self._dtypes[name]).contiguous().view(torch.uint8).numpy().reshape(-1).data)
        self.done += 1

    def sync(self) -> None:
        """Everything written so far is on the disk when this returns."""
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def finish(self) -> None:
        """Close the last file and write the index of several; ConversionError when a tensor was not written."""
        self.close()
        if self.done != len(self._order):
            raise ConversionError(f"{self._path}: {self._order[self.done]} was never written")
        if len(self._headers) > 1:
            index = {
                "metadata": {"total_size": self.bytes_total},
                "weight_map": {name: self._slots[name].file for name in sorted(self._slots)},
            }
            (self._path / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def close(self) -> None:
        if self._stream is not None:
            self.sync()
            self._stream.close()
            self._stream = None

    def _stream_of(self, file: str) -> Any:
        if self._open_file != file or self._stream is None:
            self.close()
            path = self._path / file
            self._stream = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115
            self._stream.write(self._headers[file])  # again when work is taken up: it may have been cut short
            self._open_file = file
        return self._stream


def finish_folder(path: Path, beside: Path, config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Give a folder of weights what ``beside`` holds beside its own, and state ``dtype`` in config.json.

    The file stays as it was when it says so already.
    """
    carry_over(beside, path)
    name = dtype_name(dtype)
    key = "dtype" if "dtype" in config else "torch_dtype"
    if config.get(key) not in (name, None):
        (path / "config.json").write_text(json.dumps({**config, key: name}, indent=2) + "\n")


def _plan(
    tensors: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], max_file_bytes: int
) -> tuple[dict[str, Slot], dict[str, bytes]]:
    """Slot of every tensor, and header of every file."""
    files: list[dict[str, int]] = [{}]
    for name, shape in tensors.items():
        length = int(torch.Size(shape).numel()) * dtypes[name].itemsize
        if files[-1] and sum(files[-1].values()) + length > max_file_bytes:
            files.append({})
        files[-1][name] = length
    slots: dict[str, Slot] = {}
    headers: dict[str, bytes] = {}
    for number, content in enumerate(files, 1):
        file = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, length in content.items():
            entries[name] = {
                "dtype": SAFETENSORS_NAMES[dtype_name(dtypes[name])],
                "shape": list(tensors[name]),
                "data_offsets": [at, at + length],
            }
            at += length
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data are aligned
        headers[file] = struct.pack("<Q", len(text)) + text
        for name in content:
            slots[name] = Slot(
                file, len(headers[file]) + entries[name]["data_offsets"][0], content[name], tensors[name]
            )
    return slots, headers
