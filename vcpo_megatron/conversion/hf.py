"""A Hugging Face model folder, read lazily: config.json and single tensors of its safetensors files.

Opening a folder reads headers only and checks them against each other, so that a missing, truncated
or mixed-up file is reported, all problems in one line, before anything is built. Tensors are read
one at a time; a model never sits in host memory as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..models.dtypes import SAFETENSORS_NAMES
from ..models.folder import elsewhere
from ..run.json_file import JsonFileError, read_json_object
from .dtypes import TORCH_DTYPES
from .errors import REMEDY, ConversionError, listed
from .partial import require_folder

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_HEADER_DTYPES = {SAFETENSORS_NAMES[name]: dtype for name, dtype in TORCH_DTYPES.items()}


class HFFolder:
    """Reader of one folder; a context manager, or ``close`` it.

    ``config`` is the parsed config.json. Raises ConversionError when the folder, config.json, the
    index or a shard is missing or damaged, or when index and shards disagree.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        require_folder(self.path)
        self.config: Mapping[str, Any] = read_object(self.path / "config.json")
        files, indexed = self._shards()
        self._open: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._open_all(files)
        if indexed is not None:
            self._compare(indexed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the mapped files; the folder cannot be read after it."""
        self._open.clear()

    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from its header only."""
        return tuple(self._shard(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, from its header only; ConversionError when it is not a plain float."""
        stored = self._shard(name).get_slice(name).get_dtype()
        if stored not in _HEADER_DTYPES:
            raise ConversionError(
                f"{self.path / self._file_of[name]}: tensor {name} is {stored}; only float32, bfloat16 and float16 "
                "weights are trained: use the unquantised model"
            )
        return _HEADER_DTYPES[stored]

    def tensor(self, name: str) -> Tensor:
        """One whole tensor, on the CPU, in the dtype of the file.

        Raises ConversionError when it is absent, of a dtype that is not a plain float, or holds nan or inf.
        """
        tensor = self._shard(name).get_tensor(name)
        place = f"{self.path / self._file_of[name]}: tensor {name}"
        if tensor.dtype not in TORCH_DTYPES.values():
            raise ConversionError(
                f"{place} is {tensor.dtype}; only float32, bfloat16 and float16 weights are trained: "
                "use the unquantised model"
            )
        if not bool(tensor.isfinite().all()):
            bad = int((~tensor.isfinite()).sum())
            raise ConversionError(f"{place} holds {bad} nan or infinite values of {tensor.numel()}: {REMEDY}")
        return tensor

    def _shards(self) -> tuple[list[str], Mapping[str, str] | None]:
        """Files to open, and the index (tensor name -> file) where there is one."""
        if (self.path / INDEX).is_file():
            weight_map = read_object(self.path / INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ConversionError(f"{self.path / INDEX} has no weight_map: {REMEDY}")
            if wrong := [name for name, file in weight_map.items() if not isinstance(file, str)]:
                raise ConversionError(f"{self.path / INDEX} names no file for {listed(wrong)}: {REMEDY}")
            files = sorted(set(weight_map.values()))
            if wrong := elsewhere(files):
                raise ConversionError(f"{self.path / INDEX} names files outside its folder: {listed(wrong)}: {REMEDY}")
            missing = [name for name in files if not (self.path / name).is_file()]
            if missing:
                raise ConversionError(
                    f"{self.path} misses {len(missing)} of {len(files)} weight files named in {INDEX}: "
                    f"{listed(missing)}: {REMEDY}"
                )
            return files, weight_map
        if (self.path / SINGLE).is_file():
            return [SINGLE], None
        raise ConversionError(
            f"{self.path} holds neither {SINGLE} nor {INDEX}: weights are read from safetensors files only"
        )

    def _open_all(self, files: list[str]) -> None:
        damaged, twice = [], []
        for file in files:
            try:
                self._open[file] = safe_open(self.path / file, framework="pt")
            except (SafetensorError, OSError) as error:
                damaged.append(f"{file} ({' '.join(str(error).split())})")
                continue
            names: list[str] = self._open[file].keys()
            for name in names:
                if name in self._file_of:
                    twice.append(f"{name} (in {self._file_of[name]} and {file})")
                self._file_of[name] = file
        if damaged:
            raise ConversionError(f"{self.path}: damaged or truncated weight files {listed(damaged)}: {REMEDY}")
        if twice:
            raise ConversionError(f"{self.path}: tensors stored twice: {listed(twice)}: {REMEDY}")

    def _compare(self, indexed: Mapping[str, str]) -> None:
        wrong = [name for name, file in indexed.items() if self._file_of.get(name) != file]
        if wrong:
            raise ConversionError(f"{self.path}: tensors not in the file that {INDEX} names: {listed(wrong)}: {REMEDY}")
        stray = self._file_of.keys() - indexed.keys()
        if stray:
            raise ConversionError(f"{self.path}: tensors not named in {INDEX}: {listed(sorted(stray))}: {REMEDY}")

    def _shard(self, name: str) -> Any:
        if name not in self._file_of:
            raise ConversionError(f"{self.path} has no tensor {name}")
        return self._open[self._file_of[name]]


def natural(name: str) -> tuple[object, ...]:
    """Sort key that puts layer 2 before layer 10."""
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model folder, which may begin with a byte order mark; ConversionError."""
    try:
        return read_json_object(path, byte_order_mark=True)
    except JsonFileError as error:
        raise ConversionError(f"{error}; give a complete Hugging Face model folder") from None
