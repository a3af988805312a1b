"""Megatron's distributed checkpoint on disk ("torch_dist"), read and written one tensor at a time.

Megatron saves and loads a whole model with a process a rank. Conversion must not hold a model, so it reads
and writes the same files itself: ``__N_0.distcp`` holds tensors one after another as torch.save writes them,
``.metadata`` says which piece of which tensor is where.

Names and shapes. Layers of one kind are stacked: a parameter of every layer is one tensor with the layer as first axis,
and one of every expert has the expert next. Models whose layers differ store each layer under its number. The tensor of
a parameter is that of tensor-parallel size 1, whatever the layout: fused gates as [gate; up], the vocabulary with its
padding.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ...conversion.dtypes import dtype_name, torch_dtype
from ...conversion.errors import ConversionError, listed
from ...models.shape import ModelShape
from ...run.json_file import read_json_object

METADATA, CONFIG, COMMON = ".metadata", "metadata.json", "common.pt"
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
#: Megatron stores norms where TransformerEngine's fused layers have them; where attention is latent, none are fused.
_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


@dataclass(frozen=True)
class StoredParameter:
    """Where one parameter is: key of the stored tensor, index along its leading axes, and the sizes of these axes."""

    key: str
    index: tuple[int, ...] = ()
    stack: tuple[int, ...] = ()


def is_mixed(shape: ModelShape) -> bool:
    """Whether layers differ in kind, so that they cannot be stacked."""
    return len({shape.is_moe(layer) for layer in range(shape.num_layers)}) > 1


def stored_parameter(megatron_name: str, shape: ModelShape) -> StoredParameter:
    """Where a parameter (layers and experts numbered over the whole model) is in the checkpoint."""
    found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", megatron_name)
    if not found:
        return StoredParameter(megatron_name)
    layer, rest = int(found[1]), found[2]
    if shape.latent is None:
        rest = _NORMS.get(rest, rest)
    stacked = not is_mixed(shape)
    prefix = "decoder.layers." if stacked else f"decoder.layers.{layer}."
    index: tuple[int, ...] = (layer,) if stacked else ()
    stack: tuple[int, ...] = (shape.num_layers,) if stacked else ()
    expert = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(.+)", rest)
    if not expert:
        return StoredParameter(prefix + rest, index, stack)
    assert shape.experts is not None
    key = f"{prefix}mlp.experts.experts.{expert[2]}"
    return StoredParameter(key, (*index, int(expert[1])), (*stack, shape.experts.count))


class _MetadataUnpickler(pickle.Unpickler):
    """Reads ``.metadata`` without running code: only torch's own plain descriptions are known to it."""

    def find_class(self, module: str, name: str) -> Any:
        plain = module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype))
        layout = (module, name) == ("torch.serialization", "_get_layout")
        if plain or layout or module.startswith("torch.distributed.checkpoint."):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")


class CheckpointFiles:
    """Reader of one checkpoint directory; ConversionError when it is none, or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / METADATA).is_file() or not (path / CONFIG).is_file():
            raise ConversionError(f"{path} is no Megatron distributed checkpoint (it needs {METADATA} and {CONFIG})")
        try:
            backend = read_json_object(path / CONFIG).get("sharded_backend")
            with open(path / METADATA, "rb") as file:
                metadata = _MetadataUnpickler(file).load()
        except (OSError, ValueError, AttributeError, EOFError, RecursionError, pickle.UnpicklingError) as error:
            raise ConversionError(f"{path}: its metadata cannot be read ({' '.join(str(error).split())})") from None
        if backend != "torch_dist":
            raise ConversionError(f"{path}: the format {backend!r} is not supported, only 'torch_dist'")
        self._tensors: dict[str, TensorStorageMetadata] = {
            key: value
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }
        self._places: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
        self._check_sizes()

    def keys(self) -> list[str]:
        """Keys of the model's tensors; the optimizer's are left out."""
        return [key for key in self._tensors if not key.startswith(("optimizer.", "chained_"))]

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a stored tensor, with its leading axes."""
        return tuple(self._tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        return self._tensors[key].properties.dtype

    def read(self, place: StoredParameter) -> Tensor:
        """One whole parameter, put together of all the pieces it was stored in."""
        if place.key not in self._tensors:
            raise ConversionError(f"{self.path} has no tensor {place.key}")
        metadata, axes = self._tensors[place.key], len(place.index)
        if tuple(metadata.size)[:axes] != place.stack:
            raise ConversionError(
                f"{self.path}: {place.key} has shape {list(metadata.size)}, expected {list(place.stack)} in front: "
                "configuration and checkpoint do not belong together"
            )
        size = tuple(metadata.size)[axes:]
        pieces = [
            chunk
            for chunk in metadata.chunks
            if all(o <= i < o + n for i, o, n in zip(place.index, chunk.offsets, chunk.sizes, strict=False))
        ]
        covered = sum(int(torch.Size(chunk.sizes[axes:]).numel()) for chunk in pieces)
        if covered != int(torch.Size(size).numel()):
            raise ConversionError(f"{self.path}: {place.key} {list(place.index)} is stored in part only")
        if len(pieces) == 1:
            return self._piece(place, pieces[0])
        whole = torch.empty(size, dtype=metadata.properties.dtype)
        for chunk in pieces:
            target = whole
            for dim, (offset, length) in enumerate(zip(chunk.offsets[axes:], chunk.sizes[axes:], strict=True)):
                target = target.narrow(dim, offset, length)
            target.copy_(self._piece(place, chunk))
        return whole

    def _piece(self, place: StoredParameter, chunk: ChunkStorageMetadata) -> Tensor:
        info = self._places[MetadataIndex(place.key, chunk.offsets)]
        try:
            with open(self.path / info.relative_path, "rb") as file:
                window: Any = _Window(file, info.offset, info.length)
                tensor = torch.load(window, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ConversionError(f"{self.path / info.relative_path}: {place.key} cannot be read ({reason})") from None
        for index, offset in zip(place.index, chunk.offsets, strict=False):
            tensor = tensor[index - offset]
        return tensor

    def _check_sizes(self) -> None:
        """Every file must be as long as the metadata says."""
        ends: dict[str, int] = {}
        for info in self._places.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        short = [
            name
            for name, end in ends.items()
            if not (self.path / name).is_file() or (self.path / name).stat().st_size < end
        ]
        if short:
            raise ConversionError(f"{self.path}: files missing or cut short: {listed(sorted(short))}")


class _Window(io.RawIOBase):
    """A part of a file as a file: what torch.load wants."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._at)])
        self._at += count
        return count

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data


class CheckpointWriter:
    """Writes a checkpoint piece by piece; ``entries`` can be kept and given back to go on after an interruption."""

    def __init__(self, path: Path, entries: Sequence[Sequence[Any]] = ()) -> None:
        self._path = path
        self.entries: list[list[Any]] = [list(entry) for entry in entries]
        self._files: dict[int, Any] = {}
        self._ends: dict[int, int] = {}
        for _key, file, _offsets, offset, length, *_ in self.entries:
            self._ends[file] = max(self._ends.get(file, 0), offset + length)

    def write(
        self, place: StoredParameter, size: Sequence[int], file: int, offsets: Sequence[int], piece: Tensor
    ) -> None:
        """Store ``piece``, which begins at ``offsets`` of the whole parameter of ``size``, in file number ``file``."""
        stream = self._open(file)
        start = stream.tell()
        leading = (1,) * len(place.index)
        try:
            torch.save(piece.reshape(*leading, *piece.shape), stream)
        except RuntimeError as error:  # torch's own, where the stream's says why, or Ctrl-C came within it
            raise error.__context__ if isinstance(error.__context__, OSError | KeyboardInterrupt) else error from None
        self.entries.append(
            [
                place.key,
                file,
                [*place.index, *offsets],
                start,
                stream.tell() - start,
                [*leading, *piece.shape],
                [*place.stack, *size],
                dtype_name(piece.dtype),
            ]
        )

    def sync(self) -> None:
        """Everything written so far is on the disk when this returns."""
        for stream in self._files.values():
            stream.flush()
            os.fsync(stream.fileno())

    def finish(self) -> None:
        """Write what makes the directory a checkpoint."""
        self.sync()
        for stream in self._files.values():
            stream.close()
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for key, file, offsets, start, length, sizes, whole, dtype in self.entries:
            index = MetadataIndex(key, torch.Size(offsets))
            if index in places:
                raise ConversionError(f"{self._path}: {key} {offsets} written twice")
            places[index] = _StorageInfo(_name(file), start, length)
            if key not in tensors:
                properties = TensorProperties(dtype=torch_dtype(dtype))
                tensors[key] = TensorStorageMetadata(properties, torch.Size(whole), [])
            tensors[key].chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        torch.save({}, self._path / COMMON)
        (self._path / CONFIG).write_text(json.dumps(_FORMAT))
        with open(self._path / METADATA, "wb") as file:
            pickle.dump(Metadata(state_dict_metadata=tensors, planner_data={}, storage_data=places), file)

    def close(self) -> None:
        for stream in self._files.values():
            stream.close()

    def _open(self, file: int) -> Any:
        if file not in self._files:
            path, end = self._path / _name(file), self._ends.get(file, 0)
            stream = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115
            stream.truncate(end)
            stream.seek(end)
            self._files[file] = stream
        return self._files[file]


def _name(file: int) -> str:
    return f"__{file}_0.distcp"
