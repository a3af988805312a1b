"""Weights as a folder a version on a disk that the servers share: complete, or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from ...conversion.writer import FILE_BYTES, FolderWriter
from ...types import PolicyVersion

#: What a server reads beside the tensors.
_BESIDE = ("config.json", "generation_config.json")


class WeightFolders:
    """Folders of ``path``, named by version. ``model`` is the Hugging Face folder whose config.json goes with them."""

    def __init__(self, path: Path, model: Path) -> None:
        self._path, self._model = path, model

    def clear(self) -> None:
        """Remove what an earlier attempt left."""
        shutil.rmtree(self._path, ignore_errors=True)

    def write(
        self,
        version: PolicyVersion,
        tensors: Iterable[tuple[str, torch.Tensor]],
        outline: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    ) -> Path:
        """The complete folder of ``version``, on the disk; one tensor at a time is in memory."""
        partial, final = self._path / f".{version}.partial", self._path / str(version)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        shapes = {name: shape for name, (shape, _) in outline.items()}
        dtypes = {name: dtype for name, (_, dtype) in outline.items()}
        writer = FolderWriter(partial, shapes, dtypes, FILE_BYTES)
        try:
            for name, tensor in tensors:
                writer.write(name, tensor)
            writer.finish()
        finally:
            writer.close()
        for name in _BESIDE:
            if (self._model / name).is_file():
                shutil.copyfile(self._model / name, partial / name)
        os.rename(partial, final)
        return final.absolute()
