"""How Megatron's distributed checkpoint names and shapes the parameters of a model.

Layers of one kind are stacked: a parameter of every layer is one tensor with the layer as first axis, and
one of every expert has the expert next. Models whose layers differ store each layer under its number. The
tensor of a parameter is that of tensor-parallel size 1, whatever the layout: fused gates as [gate; up], the
vocabulary with its padding.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...models.shape import ModelShape

#: Megatron stores norms where TransformerEngine's fused layers have them; where attention is latent, none are fused.
_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


@dataclass(frozen=True)
class Stored:
    """Key of the stored tensor, the index of one parameter along its leading axes, and the sizes of these axes."""

    key: str
    index: tuple[int, ...] = ()
    stack: tuple[int, ...] = ()


def is_mixed(shape: ModelShape) -> bool:
    """Whether layers differ in kind, so that they cannot be stacked."""
    return len({shape.is_moe(layer) for layer in range(shape.num_layers)}) > 1


def stored(megatron_name: str, shape: ModelShape) -> Stored:
    """Where a parameter (layers and experts numbered over the whole model) is in the checkpoint."""
    found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", megatron_name)
    if not found:
        return Stored(megatron_name)
    layer, rest = int(found[1]), found[2]
    if shape.latent is None:
        rest = _NORMS.get(rest, rest)
    stacked = not is_mixed(shape)
    prefix = "decoder.layers." if stacked else f"decoder.layers.{layer}."
    index: tuple[int, ...] = (layer,) if stacked else ()
    stack: tuple[int, ...] = (shape.num_layers,) if stacked else ()
    expert = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(.+)", rest)
    if not expert:
        return Stored(prefix + rest, index, stack)
    assert shape.experts is not None
    key = f"{prefix}mlp.experts.experts.{expert[2]}"
    return Stored(key, (*index, int(expert[1])), (*stack, shape.experts.count))
