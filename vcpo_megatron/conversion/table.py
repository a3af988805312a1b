"""Families of models as tables.

A row says which HF tensors make up one Megatron parameter and by which op. The same row serves both
directions: HF folder -> tensor-parallel shards when the learner loads a model (``shards.load_shard``),
shards -> HF tensors (``Family.to_hf``) for weight synchronisation and export, so the two cannot drift
apart. Megatron names are those of ``GPTModel`` with the local layer specification, with global layer
numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .errors import ConversionError
from .ops import Op
from .shape import ConfigRules, ModelShape, read_shape

LAYER = "{layer}"
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


@dataclass(frozen=True)
class Row:
    """One Megatron parameter (of every layer, where the name holds {layer}).

    ``hf`` maps the HF names to their shapes, written as attributes of ``ModelShape``
    ("kv_size hidden_size"), in the order that ``op`` wants them.
    """

    megatron: str
    hf: Mapping[str, str]
    op: Op

    def hf_names(self, layer: int | None) -> list[str]:
        """HF names of one layer (None for a parameter outside of the layers)."""
        return [name.replace(LAYER, str(layer)) for name in self.hf]

    def hf_shapes(self, shape: ModelShape) -> list[tuple[int, ...]]:
        """Shapes that the HF tensors must have."""
        return [tuple(getattr(shape, size) for size in sizes.split()) for sizes in self.hf.values()]


@dataclass(frozen=True)
class Family:
    """One architecture of transformers.

    architecture  the name in config.json's ``architectures``
    rows          the table, in order of the forward pass
    rules         how to read config.json
    skipped       pattern of HF tensors that are not loaded -> reason
    """

    architecture: str
    model_type: str
    rows: tuple[Row, ...]
    rules: ConfigRules
    skipped: Mapping[str, str] = field(default_factory=dict)

    def model_shape(self, hf_config: Mapping[str, Any]) -> ModelShape:
        """Sizes and options of a config.json; ConversionError names every option that is not supported."""
        return read_shape(hf_config, self.architecture, self.rules)

    def find(self, megatron_name: str) -> tuple[Row, int | None]:
        """Row and global layer number of a Megatron parameter; ConversionError when the table has none."""
        pattern, layer = _abstract(megatron_name)
        for row in self.rows:
            if row.megatron == pattern:
                return row, layer
        raise ConversionError(f"{self.architecture} has no conversion for the Megatron parameter {megatron_name}")

    def partition_dim(self, megatron_name: str) -> int | None:
        """Dimension along which tensor parallelism cuts the parameter; None when every rank holds all of it."""
        return self.find(megatron_name)[0].op.partition_dim

    def megatron_names(self, shape: ModelShape) -> list[str]:
        """Every parameter of the whole model, global layer numbers, in order of the forward pass."""
        first = [row.megatron for row in self.rows if row.megatron == EMBEDDING]
        layers = [
            row.megatron.replace(LAYER, str(layer))
            for layer in range(shape.num_layers)
            for row in self.rows
            if LAYER in row.megatron
        ]
        tied = (OUTPUT,) if shape.tie_word_embeddings else ()
        last = [row.megatron for row in self.rows if LAYER not in row.megatron]
        return first + layers + [name for name in last if name not in (EMBEDDING, *tied)]

    def sources(self, megatron_name: str, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        """HF names that a parameter is made of -> expected shapes.

        With tied embeddings the output layer, which Megatron keeps a second copy of on another pipeline
        stage than the embedding, is made of the embedding.
        """
        if megatron_name == OUTPUT and shape.tie_word_embeddings:
            megatron_name = EMBEDDING
        row, layer = self.find(megatron_name)
        if layer is not None and not 0 <= layer < shape.num_layers:
            raise ConversionError(f"{megatron_name}: the model has {shape.num_layers} layers")
        return dict(zip(row.hf_names(layer), row.hf_shapes(shape), strict=True))

    def to_hf(self, megatron_name: str, shards: Sequence[Tensor], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
        """HF tensors of one parameter from its shards, one a tensor-parallel rank in order of rank.

        Inverse of ``load_shard``. A tied output layer gives nothing: it is the embedding's copy. The tensors
        own their memory or are one of the shards. Raises ConversionError when their shapes do not fit.
        """
        if megatron_name == OUTPUT and shape.tie_word_embeddings:
            return
        row, _ = self.find(megatron_name)
        expected = self.sources(megatron_name, shape)
        for (name, size), tensor in zip(expected.items(), row.op.to_hf(shards, shape), strict=True):
            if tuple(tensor.shape) != size:
                raise ConversionError(
                    f"{megatron_name} of shape {[list(shard.shape) for shard in shards]} gives {name} of shape "
                    f"{list(tensor.shape)}, expected {list(size)}"
                )
            yield name, tensor


def _abstract(megatron_name: str) -> tuple[str, int | None]:
    """decoder.layers.7.x -> (decoder.layers.{layer}.x, 7)."""
    found = re.fullmatch(r"(decoder\.layers\.)(\d+)(\..+)", megatron_name)
    if not found:
        return megatron_name, None
    return f"{found[1]}{LAYER}{found[3]}", int(found[2])
