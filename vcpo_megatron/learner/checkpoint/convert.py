"""Hugging Face folder -> Megatron distributed checkpoint and back, one parameter at a time.

Peak host memory is a few times the largest parameter, whatever the size of the model; no process group and
no GPU are needed. What a checkpoint needs beside its tensors (config.json, tokenizer, ...) lies in its ``hf``
folder, and ``MANIFEST`` says how it was made.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from ...config.load import load_resolved
from ...conversion.dtypes import dtype_name, torch_dtype
from ...conversion.errors import ConversionError, listed
from ...conversion.families.registry import Family, ModelShape, open_model
from ...conversion.hf import HFFolder, read_object
from ...conversion.ops import GateUp
from ...conversion.partial import CopyProgress, Partial, carried_files, carry_over, fingerprint
from ...conversion.shards import unconsumed
from ...conversion.table import EMBEDDING
from ...conversion.writer import FILE_BYTES, FolderWriter, finish_folder
from ...run.directory import MANIFEST as RUN_MANIFEST
from ...run.directory import RunDirectory, read_manifest
from ...run.errors import ConfigError
from ...run.integrity import changed_files, crc_of_file, sealed, unsealed
from ...run.text import one_line
from .files import CheckpointFiles, CheckpointWriter, stored_parameter

MANIFEST, HF_PART = "vcpo_checkpoint.json", "hf"
#: Bytes after which what was written is made durable and recorded.
SYNC_BYTES = 256 * 2**20


@dataclass(frozen=True)
class CheckpointLayout:
    """The parallel sizes whose ranks will find their shards in pieces of their own; any other layout reads them too."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def check(self, shape: ModelShape, padded: int) -> None:
        """ConversionError naming every size that the layout does not divide."""
        experts = shape.experts.count if shape.experts else 1
        latent = shape.latent.cut_rows if shape.latent else ()
        own_keys = shape.num_key_value_heads if shape.num_key_value_heads != shape.num_attention_heads else 0
        dense = any(not shape.is_moe(layer) for layer in range(shape.num_layers))
        sizes = [
            (self.tensor, shape.num_attention_heads, "attention heads", "--tensor"),
            (self.tensor, own_keys, "key-value heads", "--tensor"),
            (self.tensor, shape.ffn_hidden_size if dense else 0, "units of the MLP", "--tensor"),
            (
                self.tensor,
                shape.experts.shared_ffn_hidden_size if shape.experts else 0,
                "units of the shared expert",
                "--tensor",
            ),
            *((self.tensor, rank, "rows of a latent projection", "--tensor") for rank in latent),
            (self.tensor, padded, "rows of the padded vocabulary (--vocab-multiple)", "--tensor"),
            (self.pipeline, shape.num_layers, "layers", "--pipeline"),
            (self.expert, experts, "experts", "--expert"),
        ]
        wrong = [
            f"{option} {parts} does not divide the {size} {what}" for parts, size, what, option in sizes if size % parts
        ]
        if wrong:
            raise ConversionError("; ".join(wrong))

    def file(self, family: Family, shape: ModelShape, name: str, rank: int) -> int:
        """Number of the file for tensor-parallel part ``rank`` of a parameter."""
        place = family.place(name)
        per_stage = shape.num_layers // self.pipeline
        if place.layer is None:
            stage = 0 if name == EMBEDDING else self.pipeline - 1
        else:
            stage = place.layer // per_stage
        if place.expert is None or shape.experts is None:
            return stage * self.tensor + rank
        owner = place.expert // (shape.experts.count // self.expert)
        return self.pipeline * self.tensor + stage * self.expert + owner


# --- import -----------------------------------------------------------------------------------


def import_hf(
    source: Path,
    out: Path,
    layout: CheckpointLayout,
    *,
    dtype: str | None = None,
    vocab_multiple: int = 128,
    progress: bool = True,
) -> dict[str, str]:
    """Write the checkpoint ``out`` from the HF folder ``source``; returns the tensors left out, with the reason.

    ``dtype`` None keeps the one of the files. ConversionError, before anything is written, for a folder that
    is damaged, incomplete, or holds tensors the model does not have; nothing stays behind then.
    """
    _require_outside_runs(out)
    with HFFolder(source) as folder:
        family, shape = open_model(folder.config)
        skipped = unconsumed(folder, family, shape)
        if vocab_multiple > shape.largest_vocab_multiple:
            raise ConversionError(
                f"--vocab-multiple {vocab_multiple}: most of the vocabulary, which has {shape.vocab_size} rows, would "
                f"be padding; give at most {shape.largest_vocab_multiple}"
            )
        padded = shape.padded_vocabulary(vocab_multiple)
        layout.check(shape, padded)
        kind = torch_dtype(dtype) if dtype else _one_dtype(folder, family, shape)
        job = _Import(folder, family, shape, layout, padded, kind)
        carried_files(source)  # reports their faults before the work begins
        plan = {**job.manifest(), "source": str(source.absolute()), "files": fingerprint(source)}
        partial = Partial(out, plan, job.bytes_total, [source])
        with partial.guarded():
            job.write(partial, sys.stderr if progress else None)
            (partial.path / HF_PART).mkdir(exist_ok=True)
            carry_over(source, partial.path / HF_PART)
            checksums = {name: crc_of_file(path) for name, path in partial.content().items() if name != MANIFEST}
            (partial.path / MANIFEST).write_text(sealed({**job.manifest(), "checksums": checksums}) + "\n")
            partial.finish()
    return skipped


@dataclass(frozen=True)
class _Import:
    """What is written, and in which form: ``padded`` rows of vocabulary, parameters of ``dtype``."""

    folder: HFFolder
    family: Family
    shape: ModelShape
    layout: CheckpointLayout
    padded: int
    dtype: torch.dtype

    def manifest(self) -> dict[str, Any]:
        """What the checkpoint says of itself, its checksums aside."""
        return {
            "format": 1,
            "architecture": self.family.architecture,
            "vocabulary": self.shape.vocab_size,
            "padded_vocabulary": self.padded,
            "dtype": dtype_name(self.dtype),
            "layout": asdict(self.layout),
        }

    @property
    def bytes_total(self) -> int:
        shape, sizes = self.shape, self.family.outline(self.shape, self.dtype).values()
        padding = (self.padded - shape.vocab_size) * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
        return sum(torch.Size(size).numel() * dtype.itemsize for size, dtype in sizes) + padding * self.dtype.itemsize

    def write(self, partial: Partial, stream: TextIO | None) -> None:
        """Write every parameter that ``partial`` does not hold yet; progress goes to ``stream``."""
        names = self.family.megatron_names(self.shape)
        done = partial.steps[-1]["done"] if partial.steps else 0
        writer = CheckpointWriter(partial.path, [entry for step in partial.steps for entry in step["entries"]])
        progress = CopyProgress(f"import {self.folder.path.name}", self.bytes_total, stream)
        progress.skip(sum(torch.Size(entry[5]).numel() * torch_dtype(entry[7]).itemsize for entry in writer.entries))
        recorded, unsynced = len(writer.entries), 0
        try:
            for number, name in enumerate(names[done:], done + 1):
                for count in self._write_one(name, writer):
                    unsynced += count
                    progress.add(count)
                if unsynced >= SYNC_BYTES:
                    writer.sync()
                    partial.record({"done": number, "entries": writer.entries[recorded:]})
                    recorded, unsynced = len(writer.entries), 0
            writer.finish()
        finally:
            progress.end()
            writer.close()

    def _write_one(self, name: str, writer: CheckpointWriter) -> Iterator[int]:
        """Write one parameter, a piece a rank; yields the bytes of each piece."""
        family, op = self.family, self.family.place(name).rule.op
        place = stored_parameter(name, self.shape)
        sources = {source: self.folder.tensor(source) for source in family.sources(name, self.shape)}
        dtype = family.dtype(name, self.dtype)
        for source, tensor in sources.items():
            _require_range(tensor, dtype, f"{self.folder.path}: {source}")
        parts = 1 if op.partition_dim is None or family.is_expert(name) else self.layout.tensor
        for rank in range(parts):
            shard = op.to_shard(list(sources.values()), self.shape, rank, parts, self.padded).to(dtype)
            file, dim = self.layout.file(family, self.shape, name, rank), op.partition_dim or 0
            whole = [length * (parts if axis == dim else 1) for axis, length in enumerate(shard.shape)]
            halves = shard.chunk(2) if isinstance(op, GateUp) else (shard,)
            for number, piece in enumerate(halves):
                offsets = [0] * piece.dim()
                offsets[dim] = (number * parts + rank) * piece.shape[dim]
                writer.write(place, whole, file, offsets, piece.clone() if len(halves) > 1 else piece)
                yield piece.numel() * piece.element_size()


def _one_dtype(folder: HFFolder, family: Family, shape: ModelShape) -> torch.dtype:
    parameters = [name for name in family.megatron_names(shape) if not family.place(name).rule.float32]
    found = {folder.dtype(hf) for name in parameters for hf in family.sources(name, shape)}
    if len(found) > 1:
        kinds = listed(sorted(dtype_name(kind) for kind in found))
        raise ConversionError(f"{folder.path} holds tensors of several dtypes ({kinds}): choose one with --dtype")
    return found.pop()


# --- export -----------------------------------------------------------------------------------


class OpenedCheckpoint:
    """A checkpoint with the Hugging Face folder it belongs to: tensors by their HF names."""

    def __init__(self, path: Path) -> None:
        self.path, self.hf = _locate(path)
        _require_unchanged(self.path)
        self.files = CheckpointFiles(self.path)
        self.config = read_object(self.hf / "config.json")
        self.family, self.shape = open_model(self.config)
        self.names = self.family.megatron_names(self.shape)
        self._check_keys()
        self.dtype = self._one_dtype()
        self._owner = {hf: name for name in self.names for hf in self.family.sources(name, self.shape)}
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    @property
    def computes_in(self) -> torch.dtype:
        """Dtype whose rounding log-probs have: that of the parameters they are computed with."""
        return self.dtype

    def order(self) -> dict[str, tuple[int, ...]]:
        """HF names and shapes in the order in which they are read best."""
        return {hf: size for hf, (size, _) in self.family.outline(self.shape, self.dtype).items()}

    def parameter(self, megatron_name: str) -> dict[str, Tensor]:
        """HF tensors of one parameter; ConversionError for values that are not finite."""
        whole = self.files.read(stored_parameter(megatron_name, self.shape))
        if not bool(whole.isfinite().all()):
            raise ConversionError(f"{self.path}: {megatron_name} holds nan or infinite values")
        return dict(self.family.to_hf(megatron_name, [whole], self.shape))

    def tensor(self, hf_name: str) -> Tensor:
        owner = self._owner[hf_name]
        if self._last[0] != owner:
            self._last = (owner, self.parameter(owner))
        return self._last[1][hf_name]

    def _check_keys(self) -> None:
        expected = {place.key: place for name in self.names for place in [stored_parameter(name, self.shape)]}
        missing = [key for key in expected if key not in self.files]
        extra = [key for key in self.files.keys() if key not in expected]
        for what, keys in (("misses", missing), ("holds, unknown to the model,", extra)):
            if keys:
                raise ConversionError(f"{self.path} {what} {len(keys)} tensors: {listed(keys)}")
        for name in self.names:
            place = stored_parameter(name, self.shape)
            own = list(self.files.shape(place.key)[len(place.stack) :])
            wanted = self._whole_shape(name)
            if own != wanted:
                raise ConversionError(f"{self.path}: {name} has shape {own}, expected {wanted}")

    def _whole_shape(self, name: str) -> list[int]:
        sources = self.family.sources(name, self.shape).values()
        blanks = [torch.empty(size, device="meta") for size in sources]
        padded = self.files.shape(EMBEDDING)[0]
        if padded < self.shape.vocab_size:
            raise ConversionError(f"{self.path}: {padded} rows of vocabulary, config.json has {self.shape.vocab_size}")
        return list(self.family.place(name).rule.op.to_shard(blanks, self.shape, 0, 1, padded).shape)

    def _one_dtype(self) -> torch.dtype:
        parameters = [name for name in self.names if not self.family.place(name).rule.float32]
        found = {self.files.dtype(stored_parameter(name, self.shape).key) for name in parameters}
        if len(found) > 1:
            raise ConversionError(f"{self.path} holds parameters of several dtypes: {listed(map(str, found))}")
        return found.pop()


def export_hf(
    source: Path, out: Path, *, dtype: str | None = None, max_file_bytes: int = FILE_BYTES, progress: bool = True
) -> None:
    """Write the HF folder ``out`` from a checkpoint, or from the newest one of a run directory.

    ``dtype`` None keeps the parameters' own. ConversionError leaves nothing behind.
    """
    _require_outside_runs(out)
    opened = OpenedCheckpoint(source)
    kind = torch_dtype(dtype) if dtype else opened.dtype
    dtypes = {hf: dtype for hf, (_, dtype) in opened.family.outline(opened.shape, kind).items()}
    total = sum(torch.Size(size).numel() * dtypes[hf].itemsize for hf, size in opened.order().items())
    plan = {
        "source": str(opened.path.absolute()),
        "files": fingerprint(opened.path),
        "dtype": str(kind),
        "max_file_bytes": max_file_bytes,
    }
    carried_files(opened.hf)  # reports their faults before the work begins
    partial = Partial(out, plan, total, [source, opened.path, opened.hf])
    bar = CopyProgress(f"export {out.name}", total, sys.stderr if progress else None)
    with partial.guarded():
        _write_tensors(opened, dtypes, max_file_bytes, partial, bar)
        finish_folder(partial.path, opened.hf, opened.config, kind)
        partial.finish()


def _write_tensors(
    opened: OpenedCheckpoint,
    dtypes: Mapping[str, torch.dtype],
    max_file_bytes: int,
    partial: Partial,
    progress: CopyProgress,
) -> None:
    """Write every parameter that ``partial`` does not hold yet."""
    done = partial.steps[-1]["done"] if partial.steps else 0
    begun = len({hf for name in opened.names[:done] for hf in opened.family.sources(name, opened.shape)})
    writer = FolderWriter(partial.path, opened.order(), dtypes, max_file_bytes, done=begun)
    unsynced = 0
    try:
        for number, name in enumerate(opened.names[done:], done + 1):
            for hf, tensor in opened.parameter(name).items():
                _require_range(tensor, dtypes[hf], hf)
                writer.write(hf, tensor)
                size = tensor.numel() * dtypes[hf].itemsize
                unsynced += size
                progress.add(size)
            if unsynced >= SYNC_BYTES:
                writer.sync()
                partial.record({"done": number})
                unsynced = 0
        writer.finish()
    finally:
        progress.end()
        writer.close()


def _require_range(tensor: Tensor, kind: torch.dtype, name: str) -> None:
    """Finite values must stay finite in another dtype."""
    if tensor.dtype != kind and not bool(tensor.to(kind).isfinite().all()):
        raise ConversionError(f"{name} overflows {str(kind).removeprefix('torch.')}")


def _require_outside_runs(out: Path) -> None:
    """A run removes what it takes for an old checkpoint or export of its own, so nothing else is put there."""
    if (run := _run_above(out)) is not None and RunDirectory(run).checkpoints.is_dir():  # no configuration's copy
        raise ConversionError(f"{out}: it lies in {run}, where a run keeps its own: give a name elsewhere")


def _run_above(path: Path) -> Path | None:
    """The run directory that ``path`` is or lies in, links followed."""
    real = Path(os.path.realpath(path))
    return next((folder for folder in (real, *real.parents) if RunDirectory(folder).resolved.is_file()), None)


def _require_unchanged(path: Path) -> None:
    """The files of a checkpoint are what its import or its run wrote; ConversionError names those that are not."""
    marker = next((path / name for name in (MANIFEST, RUN_MANIFEST) if (path / name).is_file()), None)
    if marker is None:
        return
    try:
        imported = marker.name == MANIFEST
        checksums = unsealed(marker.read_bytes())["checksums"] if imported else read_manifest(path).checksums
        changed = changed_files(path, checksums)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConversionError(f"{marker} is damaged: {one_line(error)}") from None
    if changed:
        raise ConversionError(f"{path} has changed since it was written: {listed(changed)}; take another checkpoint")


def _locate(path: Path) -> tuple[Path, Path]:
    """The checkpoint's directory, and its Hugging Face folder, for a run, one of its checkpoints, or an import. Links
    are followed."""
    real = Path(os.path.realpath(path))
    if (real / MANIFEST).is_file():
        return real, real / HF_PART
    run = _run_above(real)
    if run is None or real != run and not _is_checkpoint_of(run, real):
        raise ConversionError(f"{path} is neither an imported checkpoint, a run directory, nor a checkpoint of one")
    directory = RunDirectory(run)
    try:
        model = load_resolved(directory.resolved).model.path
    except ConfigError as error:
        raise ConversionError(f"{directory.resolved}: {'; '.join(error.problems)}") from None
    if real != run:
        return real, model
    if not (steps := directory.complete_steps()):
        raise ConversionError(f"{run} has no complete checkpoint")
    if (loss := directory.loss()) is not None:
        raise ConversionError(f"{loss}; put its files back, or give {directory.checkpoint(steps[-1])}, the newest one")
    return directory.checkpoint(steps[-1]), model


def _is_checkpoint_of(run: Path, path: Path) -> bool:
    """One that the run goes on from, or one that it has abandoned."""
    checkpoints = RunDirectory(run).checkpoints
    return path.name.startswith("step_") and checkpoints in (path.parent, path.parent.parent.parent)
