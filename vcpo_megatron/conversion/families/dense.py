"""Rows that the families share; a family's table is these plus what sets it apart."""

from __future__ import annotations

from ..ops import Cut, GateUp, QkvByGroup, Replicate, VocabRows
from ..table import EMBEDDING, OUTPUT, Row

_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}."

OUTER_ROWS = (
    Row(EMBEDDING, ("model.embed_tokens.weight",), VocabRows()),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",), Replicate()),
    Row(OUTPUT, ("lm_head.weight",), VocabRows()),
)

ATTENTION_NORM_ROW = Row(_M + "input_layernorm.weight", (_H + "input_layernorm.weight",), Replicate())
MLP_NORM_ROW = Row(_M + "pre_mlp_layernorm.weight", (_H + "post_attention_layernorm.weight",), Replicate())

ATTENTION_ROWS = (
    ATTENTION_NORM_ROW,
    Row(
        _M + "self_attention.linear_qkv.weight",
        tuple(f"{_H}self_attn.{x}_proj.weight" for x in "qkv"),
        QkvByGroup(),
    ),
    Row(_M + "self_attention.linear_proj.weight", (_H + "self_attn.o_proj.weight",), Cut(1)),
    MLP_NORM_ROW,
)

MLP_ROWS = (
    Row(
        _M + "mlp.linear_fc1.weight",
        (_H + "mlp.gate_proj.weight", _H + "mlp.up_proj.weight"),
        GateUp(),
        layers="dense",
    ),
    Row(_M + "mlp.linear_fc2.weight", (_H + "mlp.down_proj.weight",), Cut(1), layers="dense"),
)

QKV_BIAS_ROW = Row(
    _M + "self_attention.linear_qkv.bias", tuple(f"{_H}self_attn.{x}_proj.bias" for x in "qkv"), QkvByGroup()
)

QK_NORM_ROWS = (
    Row(_M + "self_attention.q_layernorm.weight", (_H + "self_attn.q_norm.weight",), Replicate()),
    Row(_M + "self_attention.k_layernorm.weight", (_H + "self_attn.k_norm.weight",), Replicate()),
)

# Old checkpoints store what is computed from rope_theta.
ROTARY_BUFFERS = {r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq": "computed from rope_theta"}
