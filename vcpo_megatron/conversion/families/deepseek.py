"""DeepSeek-V3: latent attention, shared and routed experts, a stored bias for the choice among them."""

from __future__ import annotations

from ...models.families import deepseek as config
from ...models.shape import ModelShape
from ..ops import Cut, Replicate
from ..table import Family, MappingRule
from .dense import ATTENTION_NORM, MLP, MLP_NORM, OUTER, ROTARY_BUFFERS
from .experts import expert_rules, shared_expert_rules

_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}.self_attn."


def _low_rank(shape: ModelShape) -> bool:
    return shape.latent is not None and shape.latent.query_rank is not None


def _full_rank(shape: ModelShape) -> bool:
    return not _low_rank(shape)


_A = _M + "self_attention."
_LATENT_ATTENTION = (
    MappingRule(_A + "linear_q_proj.weight", (_H + "q_proj.weight",), Cut(0), when=_full_rank),
    MappingRule(_A + "linear_q_down_proj.weight", (_H + "q_a_proj.weight",), Cut(0), when=_low_rank),
    MappingRule(_A + "q_layernorm.weight", (_H + "q_a_layernorm.weight",), Replicate(), when=_low_rank),
    MappingRule(_A + "linear_q_up_proj.weight", (_H + "q_b_proj.weight",), Cut(0), when=_low_rank),
    MappingRule(_A + "linear_kv_down_proj.weight", (_H + "kv_a_proj_with_mqa.weight",), Cut(0)),
    MappingRule(_A + "kv_layernorm.weight", (_H + "kv_a_layernorm.weight",), Replicate()),
    MappingRule(_A + "linear_kv_up_proj.weight", (_H + "kv_b_proj.weight",), Cut(0)),
    MappingRule(_A + "linear_proj.weight", (_H + "o_proj.weight",), Cut(1)),
)
_CHOICE_BIAS = MappingRule(
    _M + "mlp.router.expert_bias",
    ("model.layers.{layer}.mlp.gate.e_score_correction_bias",),
    Replicate(),
    layers="moe",
    float32=True,
)

DEEPSEEK_V3 = Family(
    config.DEEPSEEK_V3,
    mapping=(
        *OUTER,
        ATTENTION_NORM,
        *_LATENT_ATTENTION,
        MLP_NORM,
        *MLP,
        *expert_rules(config.DEEPSEEK_V3),
        _CHOICE_BIAS,
        *shared_expert_rules(config.DEEPSEEK_V3),
    ),
    skipped=ROTARY_BUFFERS,
)
