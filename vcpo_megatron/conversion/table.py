"""Families of models as tables.

A mapping rule says which HF tensors make up one Megatron parameter and by which op. The same rule serves every
direction: HF folder -> tensor-parallel shards when the learner loads a model or a checkpoint is
imported, shards -> HF tensors (``Family.to_hf``) for weight synchronisation and export, so that they
cannot drift apart. Megatron names are those of ``GPTModel`` with the local layer specification, with
layers and experts numbered over the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..models.families.registry import tensors
from ..models.shape import ConfigRules, ModelShape
from .errors import ConversionError
from .ops import Op

LAYER, EXPERT = "{layer}", "{expert}"
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


@dataclass(frozen=True)
class MappingRule:
    """One Megatron parameter (of every layer and expert, where the name holds {layer} or {expert}).

    ``hf`` are the HF names in the order that ``op`` wants them; their shapes are in models/shape.py.
    ``layers`` says which layers have the parameter, ``when`` which models (None: all of the family). ``float32``:
    it stays float32, whatever the dtype of the model.
    """

    megatron: str
    hf: tuple[str, ...]
    op: Op
    layers: Literal["all", "dense", "moe"] = "all"
    when: Callable[[ModelShape], bool] | None = None
    float32: bool = False

    def expand(self, shape: ModelShape, layer: int) -> list[str]:
        """Megatron names in one layer; none where the model or the layer has no such parameter."""
        if self.when is not None and not self.when(shape):
            return []
        if self.layers != "all" and (self.layers == "moe") != shape.is_moe(layer):
            return []
        name = self.megatron.replace(LAYER, str(layer))
        if EXPERT not in name or shape.experts is None:
            return [name]
        return [name.replace(EXPERT, str(expert)) for expert in range(shape.experts.count)]


@dataclass(frozen=True)
class Place:
    """Where a Megatron parameter stands: its mapping rule, and the layer and expert numbers it has."""

    rule: MappingRule
    layer: int | None
    expert: int | None

    def hf_names(self) -> list[str]:
        return [name.replace(LAYER, str(self.layer)).replace(EXPERT, str(self.expert)) for name in self.rule.hf]


@dataclass(frozen=True)
class Family:
    """One architecture of transformers.

    config_rules  how its config.json is read
    mapping       the table, in order of the forward pass within a layer
    skipped       pattern of HF tensors that are not loaded -> reason
    """

    config_rules: ConfigRules
    mapping: tuple[MappingRule, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """The name in config.json's ``architectures``."""
        return self.config_rules.architecture

    def place(self, megatron_name: str) -> Place:
        """Rule and numbers of a Megatron parameter; ConversionError when the table has none."""
        pattern, layer, expert = _abstract(megatron_name)
        for rule in self.mapping:
            if rule.megatron == pattern:
                return Place(rule, layer, expert)
        raise ConversionError(f"{self.architecture} has no conversion for the Megatron parameter {megatron_name}")

    def partition_dim(self, megatron_name: str) -> int | None:
        """Dimension along which tensor parallelism cuts the parameter; None when every rank holds all of it."""
        return self.place(megatron_name).rule.op.partition_dim

    def dtype(self, megatron_name: str, model: torch.dtype) -> torch.dtype:
        """Dtype of the parameter in a model of dtype ``model``."""
        return torch.float32 if self.place(megatron_name).rule.float32 else model

    def is_expert(self, megatron_name: str) -> bool:
        """Whether the parameter belongs to one routed expert, hence to the ranks of its expert-parallel part."""
        return self.place(megatron_name).expert is not None

    def megatron_names(self, shape: ModelShape) -> list[str]:
        """Every parameter of the whole model, in order of the forward pass."""
        layers = [
            name
            for layer in range(shape.num_layers)
            for rule in self.mapping
            if LAYER in rule.megatron
            for name in rule.expand(shape, layer)
        ]
        tied = (OUTPUT,) if shape.tie_word_embeddings else ()
        last = [rule.megatron for rule in self.mapping if LAYER not in rule.megatron]
        return [EMBEDDING, *layers, *(name for name in last if name not in (EMBEDDING, *tied))]

    def sources(self, megatron_name: str, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        """HF names that a parameter is made of -> expected shapes.

        With tied embeddings the output layer, which Megatron keeps a second copy of on another pipeline
        stage than the embedding, is made of the embedding.
        """
        if megatron_name == OUTPUT and shape.tie_word_embeddings:
            megatron_name = EMBEDDING
        place = self.place(megatron_name)
        if place.layer is not None:
            if not 0 <= place.layer < shape.num_layers:
                raise ConversionError(f"{megatron_name}: the model has {shape.num_layers} layers")
            if megatron_name not in place.rule.expand(shape, place.layer):
                raise ConversionError(f"{megatron_name}: layer {place.layer} of the model has no such parameter")
        sizes = tensors(shape)
        return {name: sizes[name] for name in place.hf_names()}

    def outline(self, shape: ModelShape, model: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """HF name -> shape and dtype in a model of dtype ``model``, in the order of ``megatron_names``."""
        return {
            hf: (size, self.dtype(name, model))
            for name in self.megatron_names(shape)
            for hf, size in self.sources(name, shape).items()
        }

    def to_hf(self, megatron_name: str, shards: Sequence[Tensor], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
        """HF tensors of one parameter from its shards, one a tensor-parallel rank in order of rank.

        Inverse of ``load_shard``. A tied output layer gives nothing: it is the embedding's copy. The tensors
        own their memory or are one of the shards. Raises ConversionError when their shapes do not fit.
        """
        if megatron_name == OUTPUT and shape.tie_word_embeddings:
            return
        op = self.place(megatron_name).rule.op
        expected = self.sources(megatron_name, shape)
        for (name, size), tensor in zip(expected.items(), op.to_hf(shards, shape), strict=True):
            if tuple(tensor.shape) != size:
                raise ConversionError(
                    f"{megatron_name} of shape {[list(shard.shape) for shard in shards]} gives {name} of shape "
                    f"{list(tensor.shape)}, expected {list(size)}"
                )
            yield name, tensor


def _abstract(megatron_name: str) -> tuple[str, int | None, int | None]:
    """decoder.layers.7.mlp.experts.local_experts.3.x -> (decoder.layers.{layer}. ... {expert}.x, 7, 3)."""
    found = re.fullmatch(r"(decoder\.layers\.)(\d+)(\..+)", megatron_name)
    if not found:
        return megatron_name, None, None
    layer, rest = int(found[2]), found[3]
    inner = re.fullmatch(r"(.*\.local_experts\.)(\d+)(\..+)", rest)
    if not inner:
        return f"{found[1]}{LAYER}{rest}", layer, None
    return f"{found[1]}{LAYER}{inner[1]}{EXPERT}{inner[3]}", layer, int(inner[2])
