"""The layers that a model is built of: the one place that chooses them.

    model.transformer_impl   matrices     local               Megatron's, whose gradients are separated in a pack
                                          transformer_engine  TransformerEngine's, unfused: one trajectory a micro-batch
    model.core_attention     attention    over packs, as the table of ``attention_kernels`` has it: TransformerEngine's
                                          kernels, or torch's (``attention``)
                             rope         TransformerEngine's kernel where it is there, but for latent attention
                             norms        ours in every case: TransformerEngine's sums the gradient over a pack

TransformerEngine's linear layers are of a kind that ``gradients.attach`` does not know: its fallback serves them.
Its attention has no parameters: any choice of it leaves packs as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from ...config.schema import ModelConfig
from ...models.shape import ModelShape
from . import platform
from .attention import FlashPackedAttention, PackedAttention, has_varlen
from .attention_kernels import (
    AttentionChoice,
    AttentionDevice,
    AttentionKernel,
    AttentionLayer,
    choose_attention,
    describe,
)
from .latent import LatentNorm, LatentSelfAttention
from .layers import RMSNorm


@dataclass(frozen=True)
class EngineLayers:
    """Megatron's wrappers of TransformerEngine's layers: column- and row-parallel linear, attention."""

    column: type
    row: type
    attention: type


def engine_layers() -> EngineLayers:
    """RuntimeError where TransformerEngine cannot be used."""
    from megatron.core.extensions import transformer_engine as engine

    if not engine.HAVE_TE:
        raise RuntimeError(
            'TransformerEngine cannot be imported, or has no GPU to run on: use model.transformer_impl = "local" and '
            'model.core_attention = "torch"'
        )
    return EngineLayers(engine.TEColumnParallelLinear, engine.TERowParallelLinear, engine.TEDotProductAttention)


def engine_options(model: ModelConfig) -> dict[str, Any]:
    """TransformerConfig where matrices are TransformerEngine's."""
    if model.transformer_impl == "local":
        return {}
    return {
        # a product that is added to the gradient buffer, or formed after the backward, would pass by the hook that
        # separates it
        "gradient_accumulation_fusion": False,
        "delay_wgrad_compute": False,
        # nothing about the weights is kept from one micro-batch to the next
        "disable_parameter_transpose_cache": True,
    }


def attention_device() -> AttentionDevice:
    """What this rank has for attention."""
    if not platform.has_gpu():
        return AttentionDevice()
    from megatron.core.extensions import transformer_engine as engine

    return AttentionDevice(
        capability=torch.cuda.get_device_capability(),
        transformer_engine=bool(engine.HAVE_TE),
        varlen=has_varlen(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def attention_choices(config: TransformerConfig, model: ModelConfig, shape: ModelShape) -> list[AttentionChoice]:
    """The kernel of every layer of the model, those of other stages included."""
    device, dtype = attention_device(), str(config.params_dtype).removeprefix("torch.")
    windowed = () if shape.window is None else shape.window.layers
    value = shape.head_dim if shape.latent is None else shape.latent.value
    return [
        choose_attention(
            model.core_attention,
            AttentionLayer(
                key_dim=shape.head_dim,
                value_dim=value,
                dtype=dtype,
                window=shape.window.tokens if shape.window is not None and layer in windowed else None,
                context=config.context_parallel_size,
            ),
            device,
        )
        for layer in range(shape.num_layers)
    ]


def rope_is_fused(shape: ModelShape) -> bool:
    """Whether queries and keys are turned by TransformerEngine's kernel, for which the host reads nothing. It knows no
    scaled cosines, which latent attention has."""
    return shape.latent is None and attention_device().transformer_engine


def describe_kernels(config: TransformerConfig, model: ModelConfig, shape: ModelShape) -> str:
    """A line for the log: what computes attention and rotary positions."""
    attention = describe(attention_choices(config, model, shape))
    return f"attention: {attention}; rope: {'TransformerEngine' if config.apply_rope_fusion else 'Megatron'}'s"


def block_spec(
    config: TransformerConfig, model: ModelConfig, shape: ModelShape, stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage; ``stage`` numbers the rank's virtual stages, None without."""
    first = get_transformer_layer_offset(config, vp_stage=stage)
    attention = attention_choices(config, model, shape)
    layers = [
        layer_spec(config, model, config.num_moe_experts if shape.is_moe(layer) else None, attention[layer].kernel)
        for layer in range(first, first + get_num_layers_to_build(config, vp_stage=stage))
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def layer_spec(
    config: TransformerConfig, model: ModelConfig, experts: int | None, kernel: AttentionKernel
) -> ModuleSpec:
    """One decoder layer; ``experts``: their number, None for a plain MLP; ``kernel``: of its attention."""
    is_latent = isinstance(config, MLATransformerConfig)
    layer = get_gpt_layer_local_spec(
        num_experts=experts,
        moe_grouped_gemm=False,
        normalization="RMSNorm",
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=is_latent,
    )
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = _attention(kernel)
    if is_latent:
        layer.submodules.self_attention.module = LatentSelfAttention
        attention.q_layernorm = attention.kv_layernorm = LatentNorm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if model.transformer_impl == "transformer_engine":
        engine, mlp = engine_layers(), layer.submodules.mlp.submodules
        attention.linear_qkv, attention.linear_proj = engine.column, engine.row
        mlp.linear_fc1, mlp.linear_fc2 = engine.column, engine.row
    return layer


def _attention(kernel: AttentionKernel) -> type:
    if kernel == "transformer_engine":
        return engine_layers().attention
    return FlashPackedAttention if kernel == "flash" else PackedAttention
