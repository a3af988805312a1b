"""Reading one rank's part of a Hugging Face folder, by a family's table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from ..models.folder import fused_experts
from ..models.shape import ModelShape
from .errors import ConversionError, listed
from .hf import REMEDY, HFFolder, natural
from .table import Family


def load_shard(
    folder: HFFolder,
    family: Family,
    shape: ModelShape,
    megatron_names: Iterable[str],
    tp_rank: int,
    tp_size: int,
    padded_vocab: int,
    *,
    expert_tp_rank: int = 0,
    expert_tp_size: int = 1,
) -> Iterator[tuple[str, Tensor]]:
    """(Megatron name, shard of ``tp_rank``) of every parameter asked for, in order, in the dtype of the file.

    megatron_names  names with global layer and expert numbers: those that this rank holds
    padded_vocab    rows of embedding and output layer over all ranks, a multiple of ``tp_size``
    expert_tp_rank, expert_tp_size  the same for parameters of routed experts, which are cut on their own

    Names and shapes of everything asked for are checked before the first tensor is read, and all
    problems are reported in one ConversionError; values (nan, inf) are checked as they are read.
    """
    names = list(megatron_names)
    if not 0 <= tp_rank < tp_size:
        raise ConversionError(f"tensor-parallel rank {tp_rank} is not one of {tp_size}")
    if padded_vocab < shape.vocab_size or padded_vocab % tp_size:
        raise ConversionError(
            f"padded vocabulary of {padded_vocab} rows must be a multiple of {tp_size} (tensor parallel size) and "
            f"hold the {shape.vocab_size} rows of the model"
        )
    _require_sources(folder, _sources(family, names, shape))

    def read() -> Iterator[tuple[str, Tensor]]:
        for name in names:
            tensors = [folder.tensor(source) for source in family.sources(name, shape)]
            rank, size = (expert_tp_rank, expert_tp_size) if family.is_expert(name) else (tp_rank, tp_size)
            yield name, family.place(name).rule.op.to_shard(tensors, shape, rank, size, padded_vocab)

    return read()


def unconsumed(folder: HFFolder, family: Family, shape: ModelShape) -> dict[str, str]:
    """HF tensors that no parameter is made of -> the reason why they are left out.

    Raises ConversionError when tensors of the model are missing, or when the folder holds tensors
    that the table does not know: training would silently go on without these weights.
    """
    wanted = _sources(family, family.megatron_names(shape), shape)
    _require_sources(folder, wanted)
    reasons = dict(family.skipped)
    if shape.tie_word_embeddings:
        reasons[r"lm_head\.weight"] = "tied to the embedding"
        _require_tied(folder)
    if shape.unused_layers:
        behind = "|".join(str(shape.num_layers + number) for number in range(shape.unused_layers))
        reasons[rf"model\.layers\.({behind})\..+"] = "a layer for multi-token prediction, which is not trained"
    left: dict[str, str] = {}
    unknown = []
    for name in folder.names():
        if name in wanted:
            continue
        reason = next((why for pattern, why in reasons.items() if re.fullmatch(pattern, name)), None)
        if reason is None:
            unknown.append(name)
        else:
            left[name] = reason
    if unknown:
        raise ConversionError(
            f"{folder.path} holds {len(unknown)} tensors that {family.architecture} with {shape.num_layers} layers "
            f"does not have: {listed(sorted(unknown, key=natural))}: config.json and weights do not belong together"
        )
    return left


def _sources(family: Family, megatron_names: Iterable[str], shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """HF names that the parameters are made of, with their shapes."""
    return {name: size for wanted in megatron_names for name, size in family.sources(wanted, shape).items()}


def _require_tied(folder: HFFolder) -> None:
    """A stored output layer must be the embedding; otherwise transformers would use it untied."""
    embedding, output = "model.embed_tokens.weight", "lm_head.weight"
    if output in folder and not torch.equal(folder.tensor(embedding), folder.tensor(output)):
        raise ConversionError(
            f"{folder.path}: tie_word_embeddings is true, but {output} differs from {embedding}: "
            "set tie_word_embeddings to false in config.json, or remove the tensor"
        )


def _require_sources(folder: HFFolder, wanted: Mapping[str, tuple[int, ...]]) -> None:
    if fused := fused_experts(folder.names()):
        raise ConversionError(f"{folder.path}: {fused}")
    missing = sorted((name for name in wanted if name not in folder), key=natural)
    if missing:
        raise ConversionError(f"{folder.path} misses {len(missing)} tensors: {listed(missing)}: {REMEDY}")
    wrong = [
        f"{name} is {list(folder.shape(name))}, expected {list(size)}"
        for name, size in wanted.items()
        if folder.shape(name) != size
    ]
    if wrong:
        raise ConversionError(
            f"{folder.path}: shapes that config.json does not give: {listed(wrong)}: "
            "config.json and weights do not belong together"
        )
