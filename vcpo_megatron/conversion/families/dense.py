"""Mapping rules that the families share; a family's table is these plus what sets it apart."""

from __future__ import annotations

from ..ops import Cut, GateUp, QkvByGroup, Replicate, VocabRows
from ..table import EMBEDDING, OUTPUT, MappingRule

_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}."

OUTER = (
    MappingRule(EMBEDDING, ("model.embed_tokens.weight",), VocabRows()),
    MappingRule("decoder.final_layernorm.weight", ("model.norm.weight",), Replicate()),
    MappingRule(OUTPUT, ("lm_head.weight",), VocabRows()),
)

ATTENTION_NORM = MappingRule(_M + "input_layernorm.weight", (_H + "input_layernorm.weight",), Replicate())
MLP_NORM = MappingRule(_M + "pre_mlp_layernorm.weight", (_H + "post_attention_layernorm.weight",), Replicate())

ATTENTION = (
    ATTENTION_NORM,
    MappingRule(
        _M + "self_attention.linear_qkv.weight",
        tuple(f"{_H}self_attn.{x}_proj.weight" for x in "qkv"),
        QkvByGroup(),
    ),
    MappingRule(_M + "self_attention.linear_proj.weight", (_H + "self_attn.o_proj.weight",), Cut(1)),
    MLP_NORM,
)

MLP = (
    MappingRule(
        _M + "mlp.linear_fc1.weight",
        (_H + "mlp.gate_proj.weight", _H + "mlp.up_proj.weight"),
        GateUp(),
        layers="dense",
    ),
    MappingRule(_M + "mlp.linear_fc2.weight", (_H + "mlp.down_proj.weight",), Cut(1), layers="dense"),
)

QKV_BIAS = MappingRule(
    _M + "self_attention.linear_qkv.bias", tuple(f"{_H}self_attn.{x}_proj.bias" for x in "qkv"), QkvByGroup()
)

QK_NORM = (
    MappingRule(_M + "self_attention.q_layernorm.weight", (_H + "self_attn.q_norm.weight",), Replicate()),
    MappingRule(_M + "self_attention.k_layernorm.weight", (_H + "self_attn.k_norm.weight",), Replicate()),
)

#: HF tensors that are not loaded -> reason. Some checkpoints store what is computed from rope_theta.
ROTARY_BUFFERS = {r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq": "computed from rope_theta"}
