"""Rows that the dense decoders share; a family's table is these plus what sets it apart."""

from __future__ import annotations

from .ops import Cut, GateUp, QkvByGroup, Replicate, VocabRows
from .table import EMBEDDING, OUTPUT, Row

_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}."

DENSE_ROWS = (
    Row(EMBEDDING, {"model.embed_tokens.weight": "vocab_size hidden_size"}, VocabRows()),
    Row(_M + "input_layernorm.weight", {_H + "input_layernorm.weight": "hidden_size"}, Replicate()),
    Row(
        _M + "self_attention.linear_qkv.weight",
        {
            _H + "self_attn.q_proj.weight": "q_size hidden_size",
            _H + "self_attn.k_proj.weight": "kv_size hidden_size",
            _H + "self_attn.v_proj.weight": "kv_size hidden_size",
        },
        QkvByGroup(),
    ),
    Row(_M + "self_attention.linear_proj.weight", {_H + "self_attn.o_proj.weight": "hidden_size q_size"}, Cut(1)),
    Row(_M + "pre_mlp_layernorm.weight", {_H + "post_attention_layernorm.weight": "hidden_size"}, Replicate()),
    Row(
        _M + "mlp.linear_fc1.weight",
        {
            _H + "mlp.gate_proj.weight": "ffn_hidden_size hidden_size",
            _H + "mlp.up_proj.weight": "ffn_hidden_size hidden_size",
        },
        GateUp(),
    ),
    Row(_M + "mlp.linear_fc2.weight", {_H + "mlp.down_proj.weight": "hidden_size ffn_hidden_size"}, Cut(1)),
    Row("decoder.final_layernorm.weight", {"model.norm.weight": "hidden_size"}, Replicate()),
    Row(OUTPUT, {"lm_head.weight": "vocab_size hidden_size"}, VocabRows()),
)

QKV_BIAS_ROW = Row(
    _M + "self_attention.linear_qkv.bias",
    {
        _H + "self_attn.q_proj.bias": "q_size",
        _H + "self_attn.k_proj.bias": "kv_size",
        _H + "self_attn.v_proj.bias": "kv_size",
    },
    QkvByGroup(),
)

QK_NORM_ROWS = (
    Row(_M + "self_attention.q_layernorm.weight", {_H + "self_attn.q_norm.weight": "head_dim"}, Replicate()),
    Row(_M + "self_attention.k_layernorm.weight", {_H + "self_attn.k_norm.weight": "head_dim"}, Replicate()),
)

# Old checkpoints store what is computed from rope_theta.
ROTARY_BUFFERS = {r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq": "computed from rope_theta"}
