"""The learner's end of ``rollout.sync`` = "disk": a folder a version on a disk that the servers share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from ...conversion.writer import FILE_BYTES, FolderWriter
from ...transport.messages import WeightsReady
from ...types import PolicyVersion
from ..expected_checksums import CheckedStream
from ..sender import Sender

#: What a server reads beside the tensors.
_BESIDE = ("config.json", "generation_config.json")


class DiskSender(Sender):
    """Writes folders of ``path``, named by version. ``model`` is the Hugging Face folder whose config.json goes with
    them, ``outline`` are shape and dtype of every tensor."""

    held = 1
    stored = True

    def __init__(self, path: Path, model: Path, outline: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self._path, self._model = path, model
        self._shapes = {name: shape for name, (shape, _) in outline.items()}
        self._dtypes = {name: dtype for name, (_, dtype) in outline.items()}

    def start(self) -> None:
        """Remove what an earlier attempt left."""
        shutil.rmtree(self._path, ignore_errors=True)

    def offer(self, version: PolicyVersion, open_stream: Callable[[], CheckedStream]) -> WeightsReady:
        stream = open_stream()
        path = self._write(version, stream)
        return WeightsReady(version, "disk", path=str(path), checksums=stream.checksums())

    def _write(self, version: PolicyVersion, tensors: Iterable[tuple[str, torch.Tensor]]) -> Path:
        """The folder of ``version``, complete or not there; one tensor at a time is in memory."""
        partial, final = self._path / f".{version}.partial", self._path / str(version)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        writer = FolderWriter(partial, self._shapes, self._dtypes, FILE_BYTES)
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
