"""Hugging Face folders that a run writes while it trains: ``RUN_DIR/exports/step_N``.

The weights of a step are gathered a parameter at a time and written as they come, so that neither a rank nor the disk
holds more than it must. The folder appears whole, by one rename; it is what ``vcpo convert export`` makes of the same
step's checkpoint, bit for bit. Training waits meanwhile.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ...config.schema import RunConfig
from ...conversion.errors import ConversionError
from ...conversion.families.registry import Family, ModelShape
from ...conversion.hf import read_object
from ...conversion.partial import Partial
from ...conversion.writer import FILE_BYTES, FolderWriter, finish_folder
from ...run.directory import RunDirectory
from ..megatron.parallel import Parallel
from ..megatron.training import Trainable
from ..weights.gather import WeightGatherer


class Exports:
    """Writes the folders; every method is collective over all ranks."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        parallel: Parallel,
        trainable: Trainable,
        gatherer: WeightGatherer,
    ) -> None:
        self._every = config.checkpoint.export_hf_every
        self._source = config.model.path
        self._directory, self._parallel = directory, parallel
        self._family, self._shape = trainable.family, trainable.shape
        self._dtype = trainable.chunks[0].config.params_dtype
        self._gatherer = gatherer

    def is_due(self, version: int) -> bool:
        """Whether the policy of this version is to be exported."""
        return self._every > 0 and version % self._every == 0

    def write(self, version: int) -> None:
        """Export the current weights. A folder that cannot be written is reported and skipped: the run goes on."""
        tensors = self._gatherer.gather()
        if self._parallel.rank != 0:
            for _ in tensors:
                pass
            return
        started = time.perf_counter()
        out = self._directory.export(version)
        try:
            write_folder(tensors, self._family, self._shape, self._dtype, self._source, out)
            print(f"{out}: exported in {time.perf_counter() - started:.1f} s", flush=True)
        except (ConversionError, OSError) as error:
            print(f"no export of step {version}: {error}", flush=True)
            for _ in tensors:  # the gathers are collective: the other ranks go through all of them
                pass


def write_folder(
    tensors: Iterator[tuple[str, Tensor]],
    family: Family,
    shape: ModelShape,
    dtype: torch.dtype,
    source: Path,
    out: Path,
) -> None:
    """Write ``tensors``, in the table's order, and what ``source`` holds beside its weights into the folder ``out``.

    Replaces a folder of the same name (a step that is taken again after a resume), and removes what an interrupted
    export left behind. ConversionError leaves nothing.
    """
    for stale in (out, *out.parent.glob("step_*.partial")):
        shutil.rmtree(stale, ignore_errors=True)
    outline = family.outline(shape, dtype)
    sizes = {name: size for name, (size, _) in outline.items()}
    dtypes = {name: kind for name, (_, kind) in outline.items()}
    total = sum(torch.Size(size).numel() * dtypes[name].itemsize for name, size in sizes.items())
    partial = Partial(out, {"step": out.name}, total)
    with partial.guarded():
        writer = FolderWriter(partial.path, sizes, dtypes, FILE_BYTES)
        try:
            for name, tensor in tensors:
                if not bool(tensor.isfinite().all()):
                    raise ConversionError(f"{name} holds nan or infinite values")
                writer.write(name, tensor)
            writer.finish()
        finally:
            writer.close()
        finish_folder(partial.path, source, read_object(source / "config.json"), dtype)
        partial.finish()
